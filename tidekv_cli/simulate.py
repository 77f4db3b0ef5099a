"""The real engine on fake tensors: exact live bytes by item for any prompt length, without memory, weights or a GPU.

Layers of one kind are alike, so few stand for all (`few_layers.py`): each one left out raises what comes after it by
what a layer of its kind leaves behind. So are chunks: only the last ones are run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tidekv_cli.assembly import engine_settings, torch_dtype
from tidekv_cli.engine import ledger
from tidekv_cli.engine.adapter import ModelAdapter
from tidekv_cli.engine.backends import simulated_backend
from tidekv_cli.engine.budgets import Layers
from tidekv_cli.engine.decode import next_logits, sampling_weights
from tidekv_cli.engine.kernel_limits import MOST_HEAD_DIM
from tidekv_cli.engine.masks import Visible
from tidekv_cli.engine.meter import LiveMeter
from tidekv_cli.engine.observation import Observation
from tidekv_cli.engine.prefill import LayerMajorPrefill, PrefillSettings
from tidekv_cli.engine.sampling import SamplingSettings
from tidekv_cli.few_layers import FewLayers, fake_tensors, few_layers
from tidekv_cli.left_out import LeftOut
from tidekv_cli.model_spec import traits_of
from tidekv_cli.plan_settings import PlanSettings, Regimes
from tidekv_cli.token_major_phases import PhasedTokenMajor

_SAMPLING = SamplingSettings(temperature=1.0, top_p=0.5)


class _GroupedProducts(TorchDispatchMode):
    """Experts' products of a mixture: torch knows their shape on fake tensors for bfloat16 only."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() == "aten::_grouped_mm" and args[0].ndim == 2:  # older torch has none
            return args[0].new_empty(args[0].shape[0], args[1].shape[-1])
        return func(*args, **(kwargs or {}))


def simulate(settings: PlanSettings, length: int, granularity: int = 1) -> list[dict[str, int]]:
    """Live bytes by item at the peak of each phase of a prompt of `length` tokens; `weights` are the whole model's.

    Phases are the chunks and the eviction of each layer that stands for others, then the logits of the prompt's last
    token, then the last decoding step, with the sampling that takes most; token-major schedules have one of each layer,
    and one of the prefill's end. `granularity` is what the device's allocator
    rounds a block up to, in bytes.
    """
    few = few_layers(_as_json(settings), settings.spec.context_window, torch_dtype(settings))
    engine = engine_settings(settings, length, simulated_backend(settings.attention, settings.device_type))
    with fake_tensors(settings.config), _GroupedProducts():
        ids = torch.zeros(1, length, dtype=torch.long)
        meter = LiveMeter(granularity)
        meter.watch(few.model.parameters())
        meter.watch([ids, *few.model.buffers()], ledger.WORKSPACE)
        adapter = ModelAdapter(few.model)
        phased = PhasedTokenMajor if settings.token_major else _PhasedPrefill
        prefill = phased(adapter, ids, engine, meter, few)
        with meter:
            prompt = prefill.run()
            phases, left_out = prefill.finish()
            del prefill  # and what it holds
            meter.restart_peak()
            more = max(settings.max_new_tokens - 2, 0)
            for store in prompt.cache:  # as it is when the last new token but one goes in
                store.pretend(more)
            sampling_weights(next_logits(adapter, prompt, [0]), _SAMPLING)
            phases.append({**meter.peak, ledger.CACHE: meter.peak[ledger.CACHE] + left_out})
    return [{**phase, ledger.WEIGHTS: few.weight_bytes} for phase in phases]


def regimes(settings: PlanSettings) -> Regimes:
    """Where memory is a straight line over the length, and where it is not."""
    few = few_layers(_as_json(settings), settings.spec.context_window, torch_dtype(settings))
    traits = traits_of(few.config)
    matrices = settings.attention in ("math", "eager") or traits.odd
    too_wide = settings.device_type == "cuda" and traits.widest_head > MOST_HEAD_DIM
    rows, *borders = [0] if settings.budget_tokens is None else _budget_borders(settings, settings.budget_tokens, few)
    observer = settings.method.selector_info.build(settings.axis_settings).observer(1)
    rows += 0 if observer is None else observer.blocks_of
    store = settings.method.store_info.build(settings.axis_settings)
    rows += store.settled
    windows = {*traits.windows, *(border + settings.max_new_tokens for border in borders)}
    return Regimes(tuple(sorted(windows)), matrices or too_wide, rows, store.step)


def _budget_borders(settings: PlanSettings, budget: int, few: FewLayers) -> Sequence[int]:
    """Prompt lengths at which the budgets of layers that see everything stop growing."""
    method, values = settings.method, settings.axis_settings
    with fake_tensors(settings.config):
        kept = ModelAdapter(few.model).visibles()
    mandatory = method.selector_info.build(values).mandatory_tokens
    policy = method.policy_info.layers.build(values)
    found: set[int] = set()
    for longest in {math.inf, *(one.window for one in kept if one.window is not None)}:
        # Of a prompt no longer than a window, layers of that window see everything too.
        sees_all = [one.everything or (one.window is not None and one.window >= longest) for one in kept]
        shares = [sees_all[stand_in] for stand_in in few.stand_ins]
        read = {sum(shares[: place + more]) for place in few.kept for more in (0, 1)}
        first, *others = policy.borders(Layers(sum(shares), 0, mandatory, budget), read)
        found.update(others)
    return first, *sorted(found)


def _as_json(settings: PlanSettings) -> str:
    return json.dumps(dict(settings.config), sort_keys=True)


class _PhasedPrefill(LayerMajorPrefill):
    """Notes the peak of each phase: phase 2 l is the chunks of layer l, phase 2 l + 1 its eviction, the last logits.

    `left_out` knows what the layers that are not run would hold.
    """

    def __init__(
        self, adapter: ModelAdapter, ids: Tensor, settings: PrefillSettings, meter: LiveMeter, few: FewLayers
    ) -> None:
        self._few = few
        super().__init__(adapter, ids, settings)
        tail = self.tail or self._length
        self.chunks, self.last_chunks = _representative(self.chunks, tail), _representative(self.last_chunks, tail)
        self.left_out = LeftOut(few, settings, self._shared_out, self._places, meter.granularity)
        self.phases: list[dict[str, int]] = []
        self._before_trims: dict[int, dict[str, int]] = {}  # live bytes by item, by the place of a layer
        self._meter = meter
        self._layers_done = 0

    def finish(self) -> tuple[list[dict[str, int]], int]:
        """Live bytes by item at the peak of each phase, and what the layers left out hold in the end."""
        trimming = self.left_out.trimming() if self._before_trims else {}
        for number, phase in enumerate(self.phases):
            left_out = self.left_out.bytes_before(number // 2)
            phase[ledger.CACHE] += left_out
            if number % 2 and number // 2 in self._before_trims:
                live = self._before_trims[number // 2]
                at_most = {item: live[item] + trimming[item] for item in live}
                at_most[ledger.CACHE] += left_out
                self.phases[number] = max(phase, at_most, key=lambda items: sum(items.values()))
        return self.phases, self.left_out.bytes_before(len(self._few.kept), over=True)

    def take(self, phase: int) -> None:
        """What came since the last call belongs to `phase`; keep the higher of it and what `phase` has so far."""
        peak = dict(self._meter.peak)
        self._meter.restart_peak()
        if phase == len(self.phases):
            self.phases.append(peak)
        elif sum(peak.values()) > sum(self.phases[phase].values()):
            self.phases[phase] = peak

    def _visibles(self) -> list[Visible]:
        kept = super()._visibles()
        return [kept[stand_in] for stand_in in self._few.stand_ins]

    def _number(self, layer: int) -> int:
        return self._few.kept[layer]

    def _compress(self, observation: Observation | None, budget: int) -> None:
        before = self._meter.live[ledger.CACHE]
        super()._compress(observation, budget)
        self.left_out.ran(self._active, self._cache[-1].length, self._meter.live[ledger.CACHE] - before)

    def _chunk(self, layer: int, start: int, stop: int, last: bool) -> Tensor | None:
        hidden = super()._chunk(layer, start, stop, last)
        self.take(2 * layer)
        return hidden

    def _revise(self, rows: list[int]) -> None:
        """Here all layers are alike: what a trim takes where they are not is added in the end."""
        if self._cache:
            self._before_trims[self._layers_done] = dict(self._meter.live)
        super()._revise(rows)

    def _evict(self) -> None:
        self.take(2 * self._layers_done)
        super()._evict()
        self.take(2 * self._layers_done + 1)
        self._layers_done += 1

    def _logits(self, hidden: Tensor) -> Any:
        logits = super()._logits(hidden)
        self.take(2 * self._layers_done)
        return logits


def _representative(chunks: Sequence[tuple[int, int]], tail: int) -> list[tuple[int, int]]:
    """All from the last three before `tail`: the first makes the buffers, another is whole, the last is shorter."""
    before = [chunk for chunk in chunks if chunk[1] <= tail]
    return before[-3:] + list(chunks[len(before) :])
