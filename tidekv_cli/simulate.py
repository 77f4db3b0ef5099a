"""The real engine on fake tensors: exact live bytes by item for any prompt length, without memory, weights or a GPU.

Layers of one kind are alike, so four stand for all: the first, two in the middle, the last. Each layer more in the
middle raises what comes after it by one layer's cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tidekv_cli.engine import ledger
from tidekv_cli.engine.adapter import ModelAdapter
from tidekv_cli.engine.decode import next_logits
from tidekv_cli.engine.meter import LiveMeter
from tidekv_cli.engine.prefill import LayerMajorPrefill, PrefillSettings

_LAYERS = 4
_CUDA_GRANULARITY = 512  # torch's CUDA allocator rounds every block up to it


@dataclass(frozen=True, slots=True)
class Simulated:
    """Live bytes by item (`ledger.ITEMS`) at the moment of the highest total, weights left out; `cache` when all is done."""

    peak: Mapping[str, int]
    cache: int

    @property
    def peak_bytes(self) -> int:
        """The highest total."""
        return sum(self.peak.values())


class FlashStandIn:
    """Allocates what a flash kernel that returns its log-sum-exp does: the output and float32 LSE."""

    name = "flash-attn"

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """See `Attention.attend`."""
        return torch.empty_like(queries), queries.new_empty(queries.shape[:3], dtype=torch.float32)


def simulate(
    config: Mapping[str, Any], dtype: torch.dtype, settings: PrefillSettings, length: int, granularity: int = 1
) -> Simulated:
    """Live bytes of a prefill of `length` tokens and of the first decoding step after it.

    `config` is a Hugging Face config; `settings` are those of the real prefill. `granularity` is what the device's
    allocator rounds a block up to, in bytes.
    """
    layers = int(config["num_hidden_layers"])
    few = min(layers, _LAYERS)
    peaks: list[dict[str, int]] = []  # of each layer, its last eviction counted to the next
    with FakeTensorMode(), torch.device("cpu"), torch.no_grad():
        model = _fake_model(config, few, dtype)
        ids = torch.zeros(1, length, dtype=torch.long)
        meter = LiveMeter(granularity)
        meter.watch([*model.parameters(), *model.buffers()])
        meter.watch([ids], ledger.WORKSPACE)
        with meter:
            prefill = LayerMajorPrefill(ModelAdapter(model), ids, settings, lambda done, total: take(done))
            per_layer = prefill.chunks_per_layer

            def take(done: int) -> None:
                layer = min((done - 1) // per_layer, few - 1)
                _raise_to(peaks, layer, meter.peak)
                meter.restart_peak()

            prompt = prefill.run()
            cache = meter.live[ledger.CACHE]
            next_logits(prefill.adapter, prompt, 0, length)
            _raise_to(peaks, few, meter.peak)
    if layers > few:  # what one layer leaves behind, once for each layer that was left out
        left = {item: peaks[2][item] - peaks[1][item] for item in ledger.ITEMS}
        for peak in peaks[2:]:
            for item in ledger.ITEMS:
                peak[item] += left[item] * (layers - few)
    highest = max(peaks, key=lambda peak: sum(peak.values()))
    return Simulated({**highest, ledger.WEIGHTS: 0}, cache // few * layers)


def _raise_to(peaks: list[dict[str, int]], layer: int, peak: Mapping[str, int]) -> None:
    """Keep the higher of `peak` and what `layer` has so far."""
    if layer == len(peaks):
        peaks.append(dict(peak))
    elif sum(peak.values()) > sum(peaks[layer].values()):
        peaks[layer] = dict(peak)


def _fake_model(config: Mapping[str, Any], layers: int, dtype: torch.dtype) -> PreTrainedModel:
    values = {**config, "num_hidden_layers": layers, "attn_implementation": "eager"}
    if config.get("layer_types"):
        values["layer_types"] = list(config["layer_types"])[:layers]
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**values), dtype=dtype).eval()
