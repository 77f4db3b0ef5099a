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
from tidekv_cli.engine.adapter import LayerCall, ModelAdapter
from tidekv_cli.engine.attention import Attention
from tidekv_cli.engine.bridge import Bridge
from tidekv_cli.engine.budgets import BudgetPolicy
from tidekv_cli.engine.scoring import Observer
from tidekv_cli.engine.selectors import LayerView, Selection, Selector, shared_by_heads, span
from tidekv_cli.engine.stores.dense import DenseStore

# (chunks done, chunks in all)
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class PrefillSettings:
    """One point on the axes, in tokens: C, b_s, and `slack` rows for tokens to come."""

    schedule: str
    selector: Selector
    policy: BudgetPolicy
    attention: Attention
    chunk_size: int
    score_block: int
    slack: int


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A compact cache with one store a layer, what was kept, the next token's logits [V], and the time it took."""

    cache: list[DenseStore]
    kept: list[Tensor]
    logits: Tensor
    length: int
    prefill_s: float
    scoring_s: float


class LayerMajorPrefill:
    """Builds the compact cache of one prompt."""

    def __init__(self, adapter: ModelAdapter, settings: PrefillSettings, progress: Progress | None = None) -> None:
        self._adapter = adapter
        self._settings = settings
        self._progress = progress or (lambda done, total: None)
        self._scoring_s = 0.0

    @torch.no_grad()
    def run(self, ids: Tensor) -> Prefilled:
        """Prefill `ids` [1, S]."""
        began = time.perf_counter()
        settings, adapter = self._settings, self._adapter
        length, layers = ids.shape[1], len(adapter.layers)
        window = settings.selector.window
        self._observer = Observer(window, length) if window else None
        oneshot = settings.schedule == "oneshot"
        active = ActiveKV(settings.attention, self._observer, length, reused=not oneshot)
        adapter.bind([active] * layers)
        # Nothing reads the last layer but the last token and the observation queries: before them, K and V suffice.
        tail = length - min(max(window, 1), length)
        cut = chunk_borders(length, length if oneshot else settings.chunk_size, tail)
        chunks = [(0, length)] if oneshot else cut
        total = len(chunks) * (layers - 1) + len(cut)
        bridge, cache, kept = Bridge(length), [], []
        hidden: Tensor | None = None
        done = 0
        for layer in range(layers):
            last = layer == layers - 1
            if oneshot:
                active.after_attention = lambda: self._evict(active, len(cache), length, cache, kept)
            for start, stop in cut if last else chunks:
                active.keys_only = last and stop <= tail
                call = adapter.record(ids[:, start:stop], start, layer)
                hidden = adapter.replay(layer, call.hidden if layer == 0 else bridge.chunk(start, stop), call)
                if hidden is not None and not last:
                    bridge.put(start, hidden)
                done += 1
                self._progress(done, total)
            if not oneshot:
                self._evict(active, layer, length, cache, kept)
        assert hidden is not None
        logits = adapter.finish(hidden, ids, 0)
        return Prefilled(cache, kept, logits, length, time.perf_counter() - began, self._scoring_s)

    def _evict(
        self, active: ActiveKV, layer: int, length: int, cache: list[DenseStore], kept: list[Tensor]
    ) -> None:
        """Keep this layer's budget of rows in a store of its own and let go of the rest."""
        began = time.perf_counter()
        settings = self._settings
        selection = self._select(active, min(settings.policy.layer_budget(layer), length))
        kept.append(selection.indices)
        cache.append(
            DenseStore(active.keys, active.values, selection.indices, settings.slack, settings.attention)
        )
        active.clear()
        self._scoring_s += time.perf_counter() - began

    def _select(self, active: ActiveKV, budget: int) -> Selection:
        keys = active.keys[0]
        observation = self._observer.take() if self._observer is not None else None
        if budget == keys.shape[1]:
            return shared_by_heads(span(0, budget, keys), keys.shape[0])
        return self._settings.selector.select(LayerView(keys, observation, self._settings.score_block), budget)


def chunk_borders(length: int, chunk_size: int, tail: int) -> list[tuple[int, int]]:
    """Chunks of at most `chunk_size` that cover 0 .. length-1, with a border at `tail`, where observation starts."""
    return [
        (start, min(start + chunk_size, part_stop))
        for part_start, part_stop in ((0, tail), (tail, length))
        for start in range(part_start, part_stop, chunk_size)
    ]
