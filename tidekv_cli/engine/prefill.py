"""Layer-major prefill: one layer over all chunks, then the next. Schedules `tide` and `oneshot` are two settings of it.

tide     chunks of C, one reused buffer for the active layer's KV, eviction when the layer is done.
oneshot  the whole prompt as one chunk, K and V held as computed, eviction right after attention, so that full KV
         is not alive during the MLP: the post-prefill baseline at its best.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tidekv_cli.engine.active import ActiveKV
from tidekv_cli.engine.adapter import ModelAdapter
from tidekv_cli.engine.attention import Attention
from tidekv_cli.engine.bridge import Bridge
from tidekv_cli.engine.budgets import BudgetPolicy
from tidekv_cli.engine.ledger import CACHE, SCORING, births_booked, book
from tidekv_cli.engine.memory import attempt, release_unused
from tidekv_cli.engine.scoring import Observation, Observer
from tidekv_cli.engine.selectors import LayerView, Selection, Selector, shared_by_heads, span
from tidekv_cli.engine.stores.dense import DenseStore

# (chunks done, chunks in all)
Progress = Callable[[int, int], None]
# Why there is no room for a chunk of that many tokens now, or None if there is.
Shortage = Callable[[int], str | None]
_LEAST_CHUNK, _LEAST_BLOCK = 256, 256


@dataclass(frozen=True, slots=True)
class PrefillSettings:
    """One point on the axes, in tokens: C, b_s, and `slack` rows for tokens to come; whether kept positions stay."""

    schedule: str
    selector: Selector
    policy: BudgetPolicy
    attention: Attention
    chunk_size: int
    score_block: int
    slack: int
    record_kept: bool = True


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A compact cache with one store a layer, and the next token's logits [V] in float32. Generated from once only.

    `kept` holds each layer's positions [Hkv, K], int64, ascending, where they were asked for. Times are in seconds;
    `scoring_s` is choosing what stays. `lowered` says what was made smaller on the way, for want of memory.
    """

    cache: list[DenseStore]
    kept: list[Tensor]
    logits: Tensor
    length: int
    prefill_s: float
    scoring_s: float
    lowered: tuple[str, ...] = ()


class LayerMajorPrefill:
    """Builds the compact cache of one prompt; one object a prompt, so nothing is left over from the one before."""

    def __init__(
        self,
        adapter: ModelAdapter,
        ids: Tensor,
        settings: PrefillSettings,
        progress: Progress | None = None,
        shortage: Shortage | None = None,
    ) -> None:
        """`ids` [1, S] is the prompt; `shortage` is asked before every chunk."""
        self.adapter = adapter
        self._ids, self._settings = ids, settings
        self._progress = progress or (lambda done, total: None)
        self._shortage = shortage or (lambda tokens: None)
        self._length = ids.shape[1]
        self._whole = settings.schedule == "oneshot"
        window = min(settings.selector.window, self._length)
        # Nothing reads the last layer but the last token and the observation queries; before them K and V suffice.
        self._tail = self._length - max(window, 1)
        self._observer = Observer(window, self._length) if window else None
        size = self._length if self._whole else settings.chunk_size
        self.last_chunks = chunk_borders(self._length, size, self._tail)  # (start, stop) of each, in the last layer
        self.chunks = [(0, self._length)] if self._whole else self.last_chunks  # in every other layer
        longest = self._length + settings.slack
        self._active = ActiveKV(settings.attention, self._observer, self._length, not self._whole, longest)
        self._bridge = Bridge(self._length)
        self._cache: list[DenseStore] = []
        self._kept: list[Tensor] = []
        self._chunk_size, self._score_block = settings.chunk_size, settings.score_block
        self._tried: tuple[int, int] | None = None  # a chunk that can only be tried again
        self._scoring_s = 0.0
        self._lowered: list[str] = []

    @torch.no_grad()
    def run(self) -> Prefilled:
        """Prefill the prompt, leaving nothing alive but the result.

        Where memory runs out, what nothing uses is given back, and the chunk is halved for the rest of the prompt,
        down to 256 tokens; in eviction the score block. Raises `MemoryError` when that does not help.
        """
        began = time.perf_counter()
        layers = len(self.adapter.layers)
        if self._whole:
            self._active.after_attention = self._evict
        self.adapter.bind([self._active] * layers, self._length)
        try:
            hidden = None
            for layer in range(layers):
                hidden = self._layer(layer, layers)
                if not self._whole:
                    self._evict()
            assert hidden is not None
            logits = self._logits(hidden)
        finally:
            self.adapter.bind(())
            self._active.after_attention = None  # else the two hold each other, and bridge and KV with them
        seconds = time.perf_counter() - began
        return Prefilled(self._cache, self._kept, logits, self._length, seconds, self._scoring_s, tuple(self._lowered))

    def _layer(self, layer: int, layers: int) -> Tensor | None:
        """One layer over all chunks; hidden states [1, n, d] after the last of them."""
        last = layer == layers - 1
        pending = self.last_chunks if last else self.chunks
        while pending:
            hidden = None  # of the chunk before
            shortage = self._shortage(pending[0][1] - pending[0][0])
            if shortage is None:
                hidden, shortage = attempt(partial(self._chunk, layer, *pending[0], last))
            if shortage is None:
                pending, self._tried = pending[1:], None
                done = len(self.chunks) * layer + len(self.last_chunks if last else self.chunks) - len(pending)
                self._progress(done, len(self.chunks) * (layers - 1) + len(self.last_chunks))
            else:
                pending = self._smaller(pending, shortage)
        return hidden

    def _insist(self, step: Callable[[], Tensor | Observation]) -> Any:
        """What `step` returns, tried once more where memory runs out."""
        result, shortage = attempt(step)
        if shortage is not None:
            release_unused(self._ids.device)
            result, shortage = attempt(step)
        if shortage is not None:
            raise MemoryError(shortage)
        return result

    def _logits(self, hidden: Tensor) -> Any:
        return self._insist(partial(self.adapter.finish, hidden, self._ids))

    def _chunk(self, layer: int, start: int, stop: int, last: bool) -> Tensor | None:
        """One layer over one chunk, written to the bridge; None where only keys and values were wanted."""
        self._active.place(start, keys_only=last and stop <= self._tail)
        call = self.adapter.record(self._ids[:, start:stop], start, layer)
        hidden = self.adapter.replay(layer, call.hidden if layer == 0 else self._bridge.chunk(start, stop), call)
        if hidden is not None and not last:
            self._bridge.put(start, hidden)
        return hidden

    def _smaller(self, pending: list[tuple[int, int]], shortage: str) -> list[tuple[int, int]]:
        """`pending` in pieces shorter than its first, as are all chunks from now on; one too short as it is, once."""
        size = pending[0][1] - pending[0][0]
        if self._whole or (size <= _LEAST_CHUNK and self._tried == pending[0]):
            raise MemoryError(shortage)
        release_unused(self._ids.device)
        if size <= _LEAST_CHUNK:
            self._tried = pending[0]
            return pending
        before = self._chunk_size
        while self._chunk_size >= size:
            self._chunk_size = max(self._chunk_size // 2, _LEAST_CHUNK)
        self._lowered.append(f"chunk_size {before} -> {self._chunk_size}: {shortage}")
        self.chunks, self.last_chunks = split(self.chunks, self._chunk_size), split(self.last_chunks, self._chunk_size)
        return split(pending, self._chunk_size)

    def _evict(self) -> None:
        """Keep the active layer's budget of rows in a store of its own and let go of the rest."""
        observation = None
        if self._observer is not None and self._active.rule.visible.everything:
            observation = self._insist(self._observer.take)
        last_try = False
        while True:
            _, shortage = attempt(partial(self._compress, observation))
            if shortage is None:
                return self._active.clear()
            if last_try:
                raise MemoryError(shortage)
            release_unused(self._ids.device)
            block = self._score_block
            last_try = observation is None or block <= _LEAST_BLOCK
            if not last_try:
                self._score_block = max(block // 2, _LEAST_BLOCK)
                self._lowered.append(f"score_block {block} -> {self._score_block}: {shortage}")

    def _compress(self, observation: Observation | None) -> None:
        settings, active = self._settings, self._active
        began = time.perf_counter()
        with births_booked(SCORING):
            selection = self._select(observation)
        self._scoring_s += time.perf_counter() - began
        store = DenseStore(active.keys, active.values, selection.indices, settings.slack, settings.attention)
        self._cache.append(store)
        if settings.record_kept:
            book(CACHE, selection.indices)
            self._kept.append(selection.indices)

    def _select(self, observation: Observation | None) -> Selection:
        """A layer that sees only some of the keys by its own rule keeps those: no selector has a say in it."""
        keys, visible = self._active.keys[0], self._active.rule.visible
        budget = min(self._settings.policy.layer_budget(len(self._cache)), self._length)
        if visible.window is not None:
            return shared_by_heads(span(max(self._length - visible.window + 1, 0), self._length, keys), keys.shape[0])
        if visible.function is not None or self._length <= self._settings.selector.mandatory_tokens:
            return shared_by_heads(span(0, self._length, keys), keys.shape[0])
        return self._settings.selector.select(LayerView(keys, observation, self._score_block), budget)


def split(chunks: list[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """The same tokens in pieces of at most `size`; every border stays."""
    return [(at, min(at + size, stop)) for start, stop in chunks for at in range(start, stop, size)]


def chunk_borders(length: int, chunk_size: int, tail: int) -> list[tuple[int, int]]:
    """Chunks of at most `chunk_size` that cover 0 .. length-1, with a border at `tail`, where observation starts."""
    return split([part for part in ((0, tail), (tail, length)) if part[0] < part[1]], chunk_size)
