"""Token by token generation over compact caches. Knows no text and no tokenizer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tidekv_cli.engine.adapter import ModelAdapter
from tidekv_cli.engine.prefill import Prefilled
from tidekv_cli.engine.sampling import SamplingSettings
from tidekv_cli.errors import ModelError


class Sampler:
    """Chooses the next token from logits [V] float32."""

    def __init__(self, settings: SamplingSettings, device: torch.device) -> None:
        self._settings = settings
        self._generator = torch.Generator(device)
        if settings.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(settings.seed)

    def choose(self, logits: Tensor) -> int:
        """The next token's id. Raises `ModelError` for logits that are no numbers."""
        settings = self._settings
        best, token = logits.max(-1)
        if not math.isfinite(best):  # NaN is the maximum wherever there is one
            raise ModelError(
                f"the model's logits are not finite (the greatest is {float(best)})",
                "its weights are damaged, or too large for the dtype: try --dtype float32",
            )
        if settings.temperature == 0.0:
            return int(token)
        return int(torch.multinomial(sampling_weights(logits, settings), 1, generator=self._generator))


def sampling_weights(logits: Tensor, settings: SamplingSettings) -> Tensor:
    """Weights [V] float64 to draw the next token by, from finite logits [V]; the temperature is above 0."""
    # Float64, and the maximum taken off first, keep a tiny temperature from making 0 / 0.
    weights = ((logits.double() - logits.max()) / settings.temperature).softmax(-1)
    if settings.top_p < 1.0:
        ranked, order = weights.sort(descending=True)
        before = ranked.cumsum(-1) - ranked  # mass of the better ones
        weights = torch.zeros_like(weights).scatter_(0, order, ranked.masked_fill(before >= settings.top_p, 0.0))
    return weights


def generate_tokens(
    adapter: ModelAdapter, prompt: Prefilled, sampling: SamplingSettings, limit: int, end: frozenset[int]
) -> Iterator[int]:
    """Up to `limit` token ids after `prompt`; ends before an id in `end`.

    Positions go on at S, whatever the cache kept. Each token's own K and V join `prompt.cache` when the one after
    it is asked for. Raises `ValueError` for a prompt that has an answer already.
    """
    if any(store.added for store in prompt.cache):
        raise ValueError("this prompt has been generated from: its cache holds an answer")
    sampler = Sampler(sampling, prompt.logits.device)
    logits = prompt.logits
    for count in range(1, limit + 1):
        token = sampler.choose(logits)
        if token in end:
            return
        yield token
        if count < limit:
            logits = next_logits(adapter, prompt, [token])


@torch.no_grad()
def next_logits(adapter: ModelAdapter, prompt: Prefilled, tokens: Sequence[int]) -> Tensor:
    """Logits [V] after `tokens`, one or several that follow what the cache has seen, whose K and V join it.

    Raises `ValueError` for tokens past `prompt.longest`.
    """
    start = prompt.length + prompt.cache[0].added
    if prompt.longest is not None and start + len(tokens) > prompt.longest:
        raise ValueError(f"{start + len(tokens)} tokens are more than the {prompt.longest} that the cache was made for")
    adapter.bind(prompt.cache)
    try:
        return adapter.step(torch.tensor([tokens], device=adapter.device), start)
    finally:
        adapter.bind(())
