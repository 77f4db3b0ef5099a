"""The real engine on fake tensors: exact live bytes by item for any prompt length, without memory, weights or a GPU.

Layers of one kind are alike, so three stand for all: the first, the last and the one before it, which each layer left
out raises by what one layer leaves behind. So are chunks: only the last ones are run.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tidekv_cli.assembly import engine_settings, torch_dtype
from tidekv_cli.engine import ledger
from tidekv_cli.engine.adapter import ModelAdapter
from tidekv_cli.engine.attention import PLAIN, Attention, Rule, choose_attention
from tidekv_cli.engine.decode import next_logits, sampling_weights
from tidekv_cli.engine.meter import LiveMeter
from tidekv_cli.engine.prefill import LayerMajorPrefill, PrefillSettings
from tidekv_cli.engine.sampling import SamplingSettings
from tidekv_cli.errors import damage_named
from tidekv_cli.plan_settings import PlanSettings

_LAYERS = 3
_SAMPLING = SamplingSettings(temperature=1.0, top_p=0.5)
_ANY_WINDOW = 1 << 20  # changes no size


class FlashStandIn:
    """Allocates what a flash kernel that returns its log-sum-exp does: the output and float32 LSE."""

    name = "flash-attn"

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, scale: float, rule: Rule = PLAIN
    ) -> tuple[Tensor, Tensor]:
        """See `Attention.attend`."""
        return torch.empty_like(queries), queries.new_empty(queries.shape[:3], dtype=torch.float32)


def simulate(settings: PlanSettings, length: int, granularity: int = 1) -> list[dict[str, int]]:
    """Live bytes by item at the peak of each phase of a prompt of `length` tokens, weights left out.

    Phases are the chunks and the eviction of the first layer, of the last but one and of the last, then the logits of
    the prompt's last token, then the last decoding step, with the sampling that takes most. `granularity` is what the
    device's allocator rounds a block up to, in bytes.
    """
    layers = settings.spec.layers
    few = min(layers, _LAYERS)
    with FakeTensorMode(), torch.device("cpu"), torch.no_grad():
        model = _fake_model(settings, few)
        ids = torch.zeros(1, length, dtype=torch.long)
        meter = LiveMeter(granularity)
        meter.watch(model.parameters())
        meter.watch([ids, *model.buffers()], ledger.WORKSPACE)
        engine = engine_settings(settings, length, _attention(settings))
        adapter = ModelAdapter(model)
        prefill = _PhasedPrefill(adapter, ids, engine, meter)
        tail = prefill.last_chunks[-1][1] - max(settings.window, 1)
        prefill.chunks, prefill.last_chunks = _unlike(prefill.chunks, tail), _unlike(prefill.last_chunks, tail)
        with meter:
            prompt = prefill.run()
            phases, live = prefill.phases, prefill.live_before
            del prefill  # and what it holds
            meter.restart_peak()
            more = max(settings.max_new_tokens - 2, 0)
            for store in prompt.cache:  # as it is when the last new token but one goes in
                store.length += more
            sampling_weights(next_logits(adapter, prompt, 0, length + more), _SAMPLING)
            phases.append(meter.peak)
    if layers > few:
        for phase in phases[2:]:
            for item in ledger.ITEMS:
                phase[item] += (live[2][item] - live[1][item]) * (layers - few)
    return [{**phase, ledger.WEIGHTS: 0} for phase in phases]


class _PhasedPrefill(LayerMajorPrefill):
    """Notes the peak of each phase: phase 2 l is the chunks of layer l, phase 2 l + 1 its eviction, the last logits.

    `live_before` is what was alive when each layer began.
    """

    def __init__(self, adapter: ModelAdapter, ids: Tensor, settings: PrefillSettings, meter: LiveMeter) -> None:
        super().__init__(adapter, ids, settings)
        self.phases: list[dict[str, int]] = []
        self.live_before: list[dict[str, int]] = []
        self._meter = meter
        self._layers_done = 0

    def take(self, phase: int) -> None:
        """What came since the last call belongs to `phase`; keep the higher of it and what `phase` has so far."""
        peak = dict(self._meter.peak)
        self._meter.restart_peak()
        if phase == len(self.phases):
            self.phases.append(peak)
        elif sum(peak.values()) > sum(self.phases[phase].values()):
            self.phases[phase] = peak

    def _layer(self, layer: int, layers: int) -> Tensor | None:
        self.live_before.append(dict(self._meter.live))
        return super()._layer(layer, layers)

    def _chunk(self, layer: int, start: int, stop: int, last: bool) -> Tensor | None:
        hidden = super()._chunk(layer, start, stop, last)
        self.take(2 * layer)
        return hidden

    def _evict(self) -> None:
        self.take(2 * self._layers_done)
        super()._evict()
        self.take(2 * self._layers_done + 1)
        self._layers_done += 1

    def _logits(self, hidden: Tensor) -> Any:
        logits = super()._logits(hidden)
        self.take(2 * self._layers_done)
        return logits


def _attention(settings: PlanSettings) -> Attention:
    if settings.device_kind == "cpu" or settings.attention == "eager":
        return choose_attention(settings.attention, torch.device("cpu"))
    return FlashStandIn()


def _unlike(chunks: Sequence[tuple[int, int]], tail: int) -> list[tuple[int, int]]:
    """All from the last three before `tail`: the first makes the buffers, another is whole, the last is shorter."""
    before = [chunk for chunk in chunks if chunk[1] <= tail]
    return before[-3:] + list(chunks[len(before) :])


def _fake_model(settings: PlanSettings, layers: int) -> PreTrainedModel:
    values = deepcopy(dict(settings.config))  # transformers writes into the parts of a config that it is given
    for key in ("_attn_implementation", "torch_dtype", "dtype"):
        values.pop(key, None)
    values |= {"num_hidden_layers": layers, "attn_implementation": "eager"}
    values["max_position_embeddings"] = settings.spec.context_window or _ANY_WINDOW
    if values.get("layer_types"):
        values["layer_types"] = list(values["layer_types"])[:layers]
    with damage_named(f"the config of the {settings.spec.architecture} describes no model that can be built"):
        config = AutoConfig.for_model(**values)
        return AutoModelForCausalLM.from_config(config, dtype=torch_dtype(settings)).eval()
