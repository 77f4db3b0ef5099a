"""Layer-major prefill: one layer over all chunks, then the next. Schedules `tide` and `oneshot` are two settings of it.

tide     chunks of C, one reused buffer for the active layer's KV, eviction when the layer is done.
oneshot  the whole prompt as one chunk, K and V held as computed, eviction right after attention, so that full KV
         is not alive during the MLP: the post-prefill baseline at its best.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tidekv_cli.engine.active import ActiveKV
from tidekv_cli.engine.adapter import ModelAdapter
from tidekv_cli.engine.attention import Attention
from tidekv_cli.engine.bridge import Bridge
from tidekv_cli.engine.budgets import BudgetPolicy, Layers
from tidekv_cli.engine.chunks import Chunk, ChunkSize, chunk_borders, split
from tidekv_cli.engine.ledger import CACHE, SCORING, births_booked, book
from tidekv_cli.engine.masks import Visible
from tidekv_cli.engine.memory import attempt, lacking, release_unused
from tidekv_cli.engine.observation import Observation
from tidekv_cli.engine.selectors import LayerView, Selection, Selector, shared_by_heads, span
from tidekv_cli.engine.stores import MakeStore, Store
from tidekv_cli.engine.stores.dense import DENSE, DenseStore
from tidekv_cli.engine.stores.rolling import RollingStore
from tidekv_cli.engine.turning import Turning

# (chunks done, chunks in all)
Progress = Callable[[int, int], None]
# Why there is no room for a chunk of that many tokens now, or None if there is.
Shortage = Callable[[int], str | None]
_LEAST_BLOCK = 256


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
    store: MakeStore = DENSE


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A compact cache with one store a layer, and the next token's logits [V] in float32. Generated from once only.

    `kept` holds each layer's positions, int64, ascending, where they were asked for: [Hkv, K], or a list by head where
    heads keep different numbers. Times are in seconds; `scoring_s` is choosing what stays. `lowered` says what was made
    smaller on the way, for want of memory. Past `longest` tokens, prompt included, a layer's window would hide rows
    that were kept as if it hid none; None where there is no end.
    """

    cache: list[Store]
    kept: list[Tensor | list[Tensor]]
    logits: Tensor
    length: int
    prefill_s: float
    scoring_s: float
    lowered: tuple[str, ...] = ()
    longest: int | None = None


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
        rolling = settings.selector.rolling
        self._turning = Turning(adapter) if rolling is not None and rolling.slots else None
        self._observer = settings.selector.observer(self._length)
        # Nothing reads the last layer but the last token and the observation queries; before them K and V suffice.
        self.tail = min(self._length if self._observer is None else self._observer.first, self._length - 1)
        size = self._length if self._whole else settings.chunk_size
        self.last_chunks = chunk_borders(self._length, size, self.tail)  # (start, stop) of each, in the last layer
        self.chunks = [(0, self._length)] if self._whole else self.last_chunks  # in every other layer
        self._longest = self._length + settings.slack
        self._active = ActiveKV(settings.attention, self._observer, self._length, not self._whole, self._longest)
        self._bridge = Bridge(self._length)
        self._cache: list[Store] = []
        self._selections: list[Selection | None] = []  # of the stores, where they are needed later
        mandatory, budget = settings.selector.mandatory_tokens, settings.policy.budget
        self._places = places_of(self._visibles(), self._longest)
        count = sum(place is not None for place in self._places)
        self._shared_out = Layers(count, self._length, mandatory, budget)
        self._budgets = settings.policy.layers.begin(self._shared_out)
        self._chunk_size, self._score_block = ChunkSize(settings.chunk_size), settings.score_block
        self._scoring_s = 0.0
        self._lowered = self._chunk_size.lowered

    @torch.no_grad()
    def run(self) -> Prefilled:
        """Prefill the prompt, leaving nothing alive but the result.

        Where memory runs out, what nothing uses is given back, and the chunk is halved for the rest of the prompt,
        down to 256 tokens; in the choice of rows the score block. Raises `MemoryError` when that does not help.
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
        kept = [] if not self._settings.record_kept else [_positions(selection) for selection in self._selections]
        longest = longest_of(self.adapter.visibles(), self._longest)
        lowered = tuple(self._lowered)
        return Prefilled(self._cache, kept, logits, self._length, seconds, self._scoring_s, lowered, longest)

    def _visibles(self) -> list[Visible]:
        """Of each layer of the whole model."""
        return self.adapter.visibles()

    def _number(self, layer: int) -> int:
        """Of the `layer`th that is run, in the whole model."""
        return layer

    def _layer(self, layer: int, layers: int) -> Tensor | None:
        """One layer over all chunks; hidden states [1, n, d] after the last of them."""
        last = layer == layers - 1
        pending = self.last_chunks if last else self.chunks
        while pending:
            hidden = None  # of the chunk before
            shortage = lacking(self._shortage, pending[0][1] - pending[0][0], self._ids.device)
            if shortage is None:
                hidden, shortage = attempt(partial(self._chunk, layer, *pending[0], last))
            if shortage is None:
                pending = pending[1:]
                self._chunk_size.passed()
                done = len(self.chunks) * layer + len(self.last_chunks if last else self.chunks) - len(pending)
                self._progress(done, len(self.chunks) * (layers - 1) + len(self.last_chunks))
            else:
                pending = self._smaller(pending, shortage)
        return hidden

    def _insist(self, step: Callable[[], Any]) -> Any:
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
        self._active.place(start, keys_only=last and stop <= self.tail)
        call = self.adapter.record(self._ids[:, start:stop], start, layer)
        hidden = self.adapter.replay(layer, call.hidden if layer == 0 else self._bridge.chunk(start, stop), call)
        if hidden is not None and not last:
            self._bridge.put(start, hidden)
        return hidden

    def _smaller(self, pending: list[Chunk], shortage: str) -> list[Chunk]:
        """See `ChunkSize.smaller`."""
        if self._whole:
            raise MemoryError(shortage)
        release_unused(self._ids.device)
        pending, size = self._chunk_size.smaller(pending, shortage), self._chunk_size.tokens
        self.chunks, self.last_chunks = split(self.chunks, size), split(self.last_chunks, size)
        return pending

    def _evict(self) -> None:
        """Keep the active layer's budget of rows in a store of its own and let go of the rest."""
        observation, rows = None, [self._length]
        if self._active.rule.visible.everything:
            if self._observer is not None:
                observation = self._insist(self._observer.take)
            if self._length > self._settings.selector.mandatory_tokens:
                rows = self._insist(partial(self._read_budgets, observation))
        if self._settings.policy.layers.revises:
            self._revise(rows)  # first, so that never more than the total is kept
        last_try = False
        while True:
            _, shortage = attempt(partial(self._compress, observation, rows[-1]))
            if shortage is None:
                break
            if last_try:
                raise MemoryError(shortage)
            release_unused(self._ids.device)
            block = self._score_block
            last_try = observation is None or block <= _LEAST_BLOCK
            if not last_try:
                self._score_block = max(block // 2, _LEAST_BLOCK)
                self._lowered.append(f"score_block {block} -> {self._score_block}: {shortage}")
        self._active.clear()

    def _read_budgets(self, observation: Observation | None) -> list[int]:
        """Of the layers that see everything, up to this one, in rows a head."""
        place = self._places[self._number(len(self._cache))]
        assert place is not None
        began = time.perf_counter()
        with births_booked(SCORING):
            rows = self._budgets.read(place, LayerView(self._active.keys[0], observation, self._score_block))
        self._scoring_s += time.perf_counter() - began
        return list(rows)

    def _compress(self, observation: Observation | None, budget: int) -> None:
        began = time.perf_counter()
        with births_booked(SCORING):
            selection = self._select(observation, budget)
        self._scoring_s += time.perf_counter() - began
        self._cache.append(self._stored(selection))
        self._remember(selection)

    def _stored(self, selection: Selection) -> Store:
        """The active layer's rows `selection`; what a layer with a window of its own keeps is dense in any case."""
        settings, active = self._settings, self._active
        rows = active.keys, active.values, selection, settings.slack, settings.attention
        rolling = settings.selector.rolling
        if not active.rule.visible.everything:
            return DenseStore(*rows)
        if rolling is None:
            return settings.store(*rows)
        held = selection.indices.shape[1]
        limit = held if held < self._length else settings.policy.budget
        store = RollingStore.of(*rows, rolling.sinks, limit)
        store.turn = None if self._turning is None else self._turning.of(len(self._cache))
        return store

    def _remember(self, selection: Selection, layer: int | None = None) -> None:
        """What will be asked for later: positions, and scores where a layer is trimmed again."""
        revised = self._settings.policy.layers.revises
        needed = None
        if self._settings.record_kept or revised:
            needed = selection if revised else replace(selection, scores=None)
            book(CACHE, needed.indices, *([] if needed.scores is None else [needed.scores]))
        if layer is None:
            self._selections.append(needed)
        else:
            self._selections[layer] = needed

    def _revise(self, rows: list[int]) -> None:
        """Trim earlier layers whose budget has fallen to `rows`, which are those of the layers that see everything."""
        for layer, store in enumerate(self._cache):
            place, held = self._places[self._number(layer)], self._selections[layer]
            if place is not None and place < len(rows) and rows[place] < store.length:
                assert held is not None
                stay = self._insist(partial(self._still_kept, held, rows[place]))
                self._insist(partial(store.trim, stay))
                self._remember(held.picked(stay), layer)

    def _still_kept(self, held: Selection, budget: int) -> Selection:
        with births_booked(SCORING):
            return self._settings.policy.heads.trim(held, budget, self._settings.selector.mandatory_tokens)

    def _select(self, observation: Observation | None, budget: int) -> Selection:
        """A layer that sees only some of the keys by its own rule keeps those: no selector has a say in it."""
        keys, visible = self._active.keys[0], self._active.rule.visible
        if visible.window is not None:
            return shared_by_heads(span(max(self._length - visible.window + 1, 0), self._length, keys), keys.shape[0])
        if visible.function is not None or self._length <= self._settings.selector.mandatory_tokens:
            return shared_by_heads(span(0, self._length, keys), keys.shape[0])
        view = LayerView(keys, observation, self._score_block)
        return self._settings.policy.select(self._settings.selector, view, budget)


def places_of(visibles: Sequence[Visible], longest: int) -> list[int | None]:
    """For each layer its number among those that see everything of `longest` tokens, None for the others."""
    whole = [one.function is None and (one.window is None or one.window >= longest) for one in visibles]
    return [sum(whole[:layer]) if everything else None for layer, everything in enumerate(whole)]


def longest_of(visibles: Sequence[Visible], longest: int) -> int | None:
    """See `Prefilled.longest`, of layers that were taken for such as see everything of `longest` tokens."""
    return longest if any(one.window is not None and one.window >= longest for one in visibles) else None


def _positions(selection: Selection | None) -> Tensor | list[Tensor]:
    assert selection is not None
    return selection.indices if selection.counts is None else list(selection.by_head(selection.indices))
