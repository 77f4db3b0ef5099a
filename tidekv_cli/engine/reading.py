"""One layer's cache while a prompt goes through all layers chunk by chunk. Knows no model and no other layer."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from tidekv_cli.engine.active import ActiveKV
from tidekv_cli.engine.attention import Rule
from tidekv_cli.engine.ledger import CACHE, SCORING, births_booked, book
from tidekv_cli.engine.observation import Observation
from tidekv_cli.engine.prefill import PrefillSettings
from tidekv_cli.engine.selectors import LayerView, Selection, shared_by_heads, span
from tidekv_cli.engine.stores.dense import DenseStore
from tidekv_cli.engine.stores.rolling import RollingStore, Turn


class ReadingKV:
    """Holds at most `budget` rows a head, at their own positions; room for them and for new tokens is made once.

    A chunk that is more than that is attended to with them in `active`, which all layers share and which then lets go
    of all but the budget: those that the selector names where the layer's rows are `chosen`, else the last ones.
    """

    def __init__(self, settings: PrefillSettings, active: ActiveKV, budget: int, chosen: bool) -> None:
        self.budget = budget
        self.scoring_s = 0.0
        self._settings, self._active, self._chosen = settings, active, chosen
        self._store: DenseStore | None = None
        self._start = 0  # of the chunk, in tokens
        self._overflows = False
        self._positions: Tensor | None = None  # [Hkv, budget], once other rows than the last ones are held

    @property
    def store(self) -> DenseStore:
        """What is held, by the one that decoding goes on with."""
        assert self._store is not None
        return self._store

    def place(self, start: int) -> None:
        """The next chunk begins at token `start`, be it for the second time, which nothing evicted yet allows."""
        self._start = start
        if self._store is not None:
            self._store.go_back(min(start, self.budget))

    def allocate(self, keys: Tensor, values: Tensor) -> None:
        """Make room for rows like those of `keys` and `values` [1, Hkv, n, D]."""
        none = shared_by_heads(span(0, 0, keys), keys.shape[1])
        slack = self.budget + self._settings.slack
        self._store = DenseStore(keys, values, none, slack, self._settings.attention)

    def pretend(self, start: int) -> None:
        """As `place`, and as if the tokens before had been read: for simulation, which reads some of them only."""
        self.place(start)
        if self._positions is None and self._records and start > self.budget:
            keys = self.store.keys
            self._positions = torch.empty(keys.shape[1], self.budget, dtype=torch.long, device=keys.device)
            book(CACHE, self._positions)

    @property
    def _records(self) -> bool:
        return self._settings.record_kept and self._chosen

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Take a chunk's rows [1, Hkv, n, D]; returns all that its queries may see."""
        if self._store is None:
            self.allocate(keys, values)
        self._overflows = self.store.length + keys.shape[2] > self.budget
        if not self._overflows:
            return self.store.append(keys, values)
        self._active.place(0, keys_only=False)
        self._active.append(self.store.keys, self.store.values)
        return self._active.append(keys, values)

    def attend(self, queries: Tensor, scale: float, rule: Rule) -> Tensor:
        """Output [1, Hq, n, Dv] of the chunk's queries; then what is too much is evicted, after these have seen it."""
        if not self._overflows:
            return self.store.attend(queries, scale, rule)
        length = self._active.keys.shape[2]
        observer = self._settings.selector.observer(length) if self._chosen else None
        self._active.observer = observer
        out = self._active.attend(queries, scale, rule)
        self._active.observer = None
        selection = self._selected(None if observer is None else observer.take())
        if self._records:
            self._remember(selection, queries.shape[2])
        self.store.fill(self._active.keys, self._active.values, selection)
        return out

    def _selected(self, observation: Observation | None) -> Selection:
        keys, settings = self._active.keys[0], self._settings
        heads, length, _ = keys.shape
        if not self._chosen:
            return shared_by_heads(span(length - self.budget, length, keys), heads)
        began = time.perf_counter()
        with births_booked(SCORING):
            view = LayerView(keys, observation, settings.score_block)
            selection = settings.policy.select(settings.selector, view, self.budget)
        self.scoring_s += time.perf_counter() - began
        return selection

    def _remember(self, selection: Selection, tokens: int) -> None:
        """Where the rows of `selection` are in the prompt, after a chunk of so many `tokens`."""
        stop, indices = self._start + tokens, selection.indices
        if self._positions is None:
            self._positions = indices  # every token so far was still there
        else:
            fresh = span(self._start, stop, indices).expand(len(indices), -1)
            self._positions = torch.cat((self._positions, fresh), 1).gather(1, indices)
        book(CACHE, self._positions)

    def positions(self, length: int) -> Tensor:
        """Of the rows held of a prompt of `length` tokens: [Hkv, L] int64, ascending."""
        if self._positions is None:
            keys = self.store.keys
            self._positions = shared_by_heads(span(length - keys.shape[2], length, keys), keys.shape[1]).indices
            book(CACHE, self._positions)
        return self._positions


class StreamingKV:
    """The same where the oldest rows make room for new ones: sinks and recent rows, seen by each query at its time."""

    scoring_s = 0.0

    def __init__(
        self, settings: PrefillSettings, active: ActiveKV, budget: int, length: int, turn: Turn | None
    ) -> None:
        """Of a prompt of `length` tokens; `turn` as for `RollingStore`."""
        assert settings.selector.rolling is not None
        self.budget = budget
        self._settings, self._active, self._turn = settings, active, turn
        self._limit = budget if budget < length else max(budget, settings.policy.budget)
        self._sinks = min(settings.selector.rolling.sinks, self._limit - 1)
        self._store: RollingStore | None = None

    @property
    def store(self) -> RollingStore:
        """What is held, by the one that decoding goes on with."""
        assert self._store is not None
        return self._store

    def place(self, start: int) -> None:
        """The next chunk begins at token `start`, after all that were read."""

    def allocate(self, keys: Tensor, values: Tensor) -> None:
        """Make room for rows like those of `keys` and `values` [1, Hkv, n, D]."""
        room = max(self.budget - self._sinks, 0) + max(self._settings.slack, 1)
        self._store = RollingStore(keys, values, self._limit, self._sinks, room, self._settings.attention)
        self._store.turn, self._store.overflow = self._turn, self._active

    def pretend(self, start: int) -> None:
        """As if `start` tokens had been read: for simulation."""
        self.store.begin_at(start)

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Take a chunk's rows [1, Hkv, n, D]."""
        if self._store is None:
            self.allocate(keys, values)
        return self.store.append(keys, values)

    def attend(self, queries: Tensor, scale: float, rule: Rule) -> Tensor:
        """Output [1, Hq, n, Dv] of the chunk's queries."""
        return self.store.attend(queries, scale, rule)

    def positions(self, length: int) -> Tensor:
        """Of the rows held of a prompt of `length` tokens: [Hkv, L] int64, ascending."""
        like, sunk = self.store.keys, min(self._sinks, length)
        held = torch.cat((span(0, sunk, like), span(length - (self.store.length - sunk), length, like)))
        found = shared_by_heads(held, like.shape[1]).indices
        book(CACHE, found)
        return found
