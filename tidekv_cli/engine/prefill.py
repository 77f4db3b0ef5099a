"""Layer-major prefill: one layer over all chunks, then the next. Schedules `tide` and `oneshot` are two settings of it.

tide     chunks of C, one reused buffer for the active layer's KV, eviction when the layer is done.
oneshot  the whole prompt as one chunk, K and V held as computed, eviction right after attention, so that full KV
         is not alive during the MLP: the post-prefill baseline at its best.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tidekv_cli.engine.active import ActiveKV
from tidekv_cli.engine.adapter import ModelAdapter
from tidekv_cli.engine.attention import Attention
from tidekv_cli.engine.bridge import Bridge
from tidekv_cli.engine.budgets import BudgetPolicy
from tidekv_cli.engine.ledger import SCORING, births_booked
from tidekv_cli.engine.scoring import Observer
from tidekv_cli.engine.selectors import LayerView, Selection, Selector, shared_by_heads, span
from tidekv_cli.engine.stores.dense import DenseStore

# (chunks done, chunks in all)
Progress = Callable[[int, int], None]


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
    `scoring_s` is choosing what stays.
    """

    cache: list[DenseStore]
    kept: list[Tensor]
    logits: Tensor
    length: int
    prefill_s: float
    scoring_s: float


class LayerMajorPrefill:
    """Builds the compact cache of one prompt; one object a prompt, so nothing is left over from the one before."""

    def __init__(
        self, adapter: ModelAdapter, ids: Tensor, settings: PrefillSettings, progress: Progress | None = None
    ) -> None:
        """`ids` [1, S] is the prompt."""
        self.adapter = adapter
        self._ids, self._settings = ids, settings
        self._progress = progress or (lambda done, total: None)
        self._length = ids.shape[1]
        self._whole = settings.schedule == "oneshot"
        window = min(settings.selector.window, self._length)
        # Nothing reads the last layer but the last token and the observation queries; before them K and V suffice.
        self._tail = self._length - max(window, 1)
        self._observer = Observer(window, self._length) if window else None
        size = self._length if self._whole else settings.chunk_size
        self.last_chunks = chunk_borders(self._length, size, self._tail)  # (start, stop) of each, in the last layer
        self.chunks = [(0, self._length)] if self._whole else self.last_chunks  # in every other layer
        self._active = ActiveKV(settings.attention, self._observer, self._length, reused=not self._whole)
        self._bridge = Bridge(self._length)
        self._cache: list[DenseStore] = []
        self._kept: list[Tensor] = []
        self._scoring_s = 0.0

    @torch.no_grad()
    def run(self) -> Prefilled:
        """Prefill the prompt, leaving nothing alive but the result."""
        began = time.perf_counter()
        layers = len(self.adapter.layers)
        chunks, cut = self.chunks, self.last_chunks
        total = len(chunks) * (layers - 1) + len(cut)
        if self._whole:
            self._active.after_attention = self._evict
        self.adapter.bind([self._active] * layers)
        try:
            hidden = None
            for layer in range(layers):
                last = layer == layers - 1
                for number, (start, stop) in enumerate(cut if last else chunks, 1):
                    self._active.place(start, keys_only=last and stop <= self._tail)
                    hidden = self._advance(layer, start, stop)
                    if hidden is not None and not last:
                        self._bridge.put(start, hidden)
                    self._progress(layer * len(chunks) + number, total)
                if not self._whole:
                    self._evict()
            assert hidden is not None
            logits = self.adapter.finish(hidden, self._ids)
        finally:
            self.adapter.bind(())
            self._active.after_attention = None  # else the two hold each other, and bridge and KV with them
        return Prefilled(self._cache, self._kept, logits, self._length, time.perf_counter() - began, self._scoring_s)

    def _advance(self, layer: int, start: int, stop: int) -> Tensor | None:
        """One layer over one chunk: hidden states [1, n, d] after it, or None where only K and V were wanted."""
        call = self.adapter.record(self._ids[:, start:stop], start, layer)
        hidden = call.hidden if layer == 0 else self._bridge.chunk(start, stop)
        return self.adapter.replay(layer, hidden, call)

    def _evict(self) -> None:
        """Keep the active layer's budget of rows in a store of its own and let go of the rest."""
        settings, active = self._settings, self._active
        budget = min(settings.policy.layer_budget(len(self._cache)), self._length)
        began = time.perf_counter()
        with births_booked(SCORING):
            selection = self._select(budget)
        self._scoring_s += time.perf_counter() - began
        if settings.record_kept:
            self._kept.append(selection.indices)
        self._cache.append(
            DenseStore(active.keys, active.values, selection.indices, settings.slack, settings.attention)
        )
        active.clear()

    def _select(self, budget: int) -> Selection:
        keys = self._active.keys[0]
        observation = self._observer.take() if self._observer is not None else None
        if budget == self._length:
            return shared_by_heads(span(0, budget, keys), keys.shape[0])
        return self._settings.selector.select(LayerView(keys, observation, self._settings.score_block), budget)


def chunk_borders(length: int, chunk_size: int, tail: int) -> list[tuple[int, int]]:
    """Chunks of at most `chunk_size` that cover 0 .. length-1, with a border at `tail`, where observation starts."""
    return [
        (start, min(start + chunk_size, part_stop))
        for part_start, part_stop in ((0, tail), (tail, length))
        for start in range(part_start, part_stop, chunk_size)
    ]
