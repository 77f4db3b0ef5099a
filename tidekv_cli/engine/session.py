"""The engine's front: one loaded model, one prompt after another. What is not offered here is not public."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tidekv_cli.engine import ledger
from tidekv_cli.engine.adapter import ModelAdapter
from tidekv_cli.engine.decode import generate_tokens, next_logits
from tidekv_cli.engine.memory import restart_device_peaks, unused_bytes
from tidekv_cli.engine.meter import LiveMeter
from tidekv_cli.engine.prefill import LayerMajorPrefill, Prefilled, PrefillSettings, Progress, Shortage
from tidekv_cli.engine.sampling import SamplingSettings
from tidekv_cli.engine.token_major import TokenMajorPrefill

_PREFILLS: dict[str, type[LayerMajorPrefill] | type[TokenMajorPrefill]] = {
    "tide": LayerMajorPrefill,
    "oneshot": LayerMajorPrefill,
    "chunked": TokenMajorPrefill,
    "online": TokenMajorPrefill,
}
_CUDA_BLOCK = 512  # bytes: torch's CUDA allocator rounds up to it


class Session:
    """Prefills prompts and generates from them. Prompts are independent of each other."""

    def __init__(self, model: PreTrainedModel, end_token_ids: frozenset[int]) -> None:
        self.adapter = ModelAdapter(model)
        self._end = end_token_ids
        self._model = model

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.adapter.device

    @property
    def held_bytes(self) -> int:
        """What weights take on the device, and what torch holds there without using it."""
        return sum(weight.nbytes for weight in self._model.parameters()) + unused_bytes(self.device)

    def prefill(
        self,
        token_ids: Sequence[int],
        settings: PrefillSettings,
        progress: Progress | None = None,
        shortage: Shortage | None = None,
        ceiling_bytes: int | None = None,
    ) -> tuple[Prefilled, int]:
        """Build the compact cache of a prompt; also the live-tensor peak in bytes while it was built, with weights.

        Live tensors above `ceiling_bytes` count as memory that has run out. Raises `MemoryError` where a smaller
        chunk and score block do not help.
        """
        restart_device_peaks(self.device)
        ids = torch.tensor([token_ids], device=self.device)
        meter = LiveMeter(_CUDA_BLOCK if self.device.type == "cuda" else 1, ceiling_bytes)
        meter.watch([*self._model.parameters(), *self._model.buffers()])
        meter.watch([ids], ledger.WORKSPACE)
        with meter:
            prompt = _PREFILLS[settings.schedule](self.adapter, ids, settings, progress, shortage).run()
        return prompt, meter.peak_bytes

    def follow(self, prompt: Prefilled, token_ids: Sequence[int]) -> Tensor:
        """Logits [V] after tokens that follow what the cache has seen, whose K and V join it."""
        return next_logits(self.adapter, prompt, token_ids)

    def generate(self, prompt: Prefilled, sampling: SamplingSettings, limit: int) -> Iterator[int]:
        """Token ids of the answer, at most `limit`, without the end token."""
        return generate_tokens(self.adapter, prompt, sampling, limit, self._end)
