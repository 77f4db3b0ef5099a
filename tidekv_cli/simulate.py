"""The real engine on fake tensors: exact live bytes by item for any prompt length, without memory, weights or a GPU.

Layers of one kind are alike, so four stand for all: the first, two in the middle, the last. Each layer more in the
middle raises what comes after it by what one layer leaves behind. So are chunks: of those in the middle none is run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tidekv_cli.assembly import engine_settings, torch_dtype
from tidekv_cli.engine import ledger
from tidekv_cli.engine.adapter import ModelAdapter
from tidekv_cli.engine.attention import Attention, choose_attention
from tidekv_cli.engine.decode import next_logits
from tidekv_cli.engine.meter import LiveMeter
from tidekv_cli.engine.prefill import LayerMajorPrefill
from tidekv_cli.plan import PlanSettings

_LAYERS = 4


class FlashStandIn:
    """Allocates what a flash kernel that returns its log-sum-exp does: the output and float32 LSE."""

    name = "flash-attn"

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """See `Attention.attend`."""
        return torch.empty_like(queries), queries.new_empty(queries.shape[:3], dtype=torch.float32)


def simulate(settings: PlanSettings, length: int, granularity: int = 1) -> list[dict[str, int]]:
    """Live bytes by item at the peak of each phase of a prompt of `length` tokens, weights left out.

    Phases are the first layer, two in the middle, the last, and the first decoding step; an eviction counts to the
    phase after it. `granularity` is what the device's allocator rounds a block up to, in bytes.
    """
    layers = settings.spec.layers
    few = min(layers, _LAYERS)
    phases: list[dict[str, int]] = []
    with FakeTensorMode(), torch.device("cpu"), torch.no_grad():
        model = _fake_model(settings, few)
        ids = torch.zeros(1, length, dtype=torch.long)
        meter = LiveMeter(granularity)
        meter.watch([*model.parameters(), *model.buffers()])
        meter.watch([ids], ledger.WORKSPACE)
        engine = engine_settings(settings, length, _attention(settings))
        prefill = LayerMajorPrefill(ModelAdapter(model), ids, engine, lambda done, total: take(done))

        def take(done: int) -> None:
            _raise_to(phases, min((done - 1) // len(prefill.chunks), few - 1), meter.peak)
            meter.restart_peak()

        tail = prefill.last_chunks[-1][1] - max(settings.window, 1)
        prefill.chunks, prefill.last_chunks = _unlike(prefill.chunks, tail), _unlike(prefill.last_chunks, tail)
        with meter:
            prompt = prefill.run()
            next_logits(prefill.adapter, prompt, 0, length)
            _raise_to(phases, few, meter.peak)
    if layers > few:  # what one layer leaves behind, once for each layer that was left out
        left = {item: phases[2][item] - phases[1][item] for item in ledger.ITEMS}
        for phase in phases[2:]:
            for item in ledger.ITEMS:
                phase[item] += left[item] * (layers - few)
    return [{**phase, ledger.WEIGHTS: 0} for phase in phases]


def _attention(settings: PlanSettings) -> Attention:
    if settings.device_kind == "cpu" or settings.attention == "eager":
        return choose_attention(settings.attention, torch.device("cpu"))
    return FlashStandIn()


def _unlike(chunks: Sequence[tuple[int, int]], tail: int) -> list[tuple[int, int]]:
    """The first chunk, the last two before `tail`, and all from there on: those left out allocate what these do."""
    before = [chunk for chunk in chunks if chunk[1] <= tail]
    return before[:1] + before[1:][-2:] + list(chunks[len(before) :])


def _raise_to(peaks: list[dict[str, int]], layer: int, peak: Mapping[str, int]) -> None:
    """Keep the higher of `peak` and what `layer` has so far."""
    if layer == len(peaks):
        peaks.append(dict(peak))
    elif sum(peak.values()) > sum(peaks[layer].values()):
        peaks[layer] = dict(peak)


def _fake_model(settings: PlanSettings, layers: int) -> PreTrainedModel:
    values = {**settings.config, "num_hidden_layers": layers, "attn_implementation": "eager"}
    if values.get("layer_types"):
        values["layer_types"] = list(values["layer_types"])[:layers]
    config = AutoConfig.for_model(**values)
    return AutoModelForCausalLM.from_config(config, dtype=torch_dtype(settings)).eval()
