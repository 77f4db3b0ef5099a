"""Rolling store: attention sinks and the most recent rows, of which new ones take the place of the oldest, for ever."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor

from tidekv_cli.engine.active import ActiveKV
from tidekv_cli.engine.attention import Attention, Rule, few_keys, merge, with_sinks
from tidekv_cli.engine.ledger import CACHE, book
from tidekv_cli.engine.masks import Visible
from tidekv_cli.engine.selectors import Selection
from tidekv_cli.engine.stores import Store

# (queries [1, H, n, D], whole numbers [n]) -> the same queries as if each were so many positions earlier
Turn = Callable[[Tensor, Tensor], Tensor]
_SPARE = 64  # rows, so that the recent ones are seldom moved


class RollingStore(Store):
    """`limit` rows a head at most: the first `sinks`, and the newest. Every query sees what was held at its own time.

    With `turn`, places in the cache count as positions: queries are turned back for the sinks, which else would be
    further and further away; among the recent rows distances are the same either way.
    """

    def __init__(self, keys: Tensor, values: Tensor, limit: int, sinks: int, room: int, attention: Attention) -> None:
        """Empty, for rows like `keys` and `values` [1, Hkv, n, D], with `room` for so many, or all there ever are."""
        self._attention, self._limit = attention, limit
        self._most = limit - sinks  # recent rows
        room = min(room, self._most + _SPARE)
        self._sinks = _rows(keys, sinks), _rows(values, sinks)
        self._recent = _rows(keys, room), _rows(values, room)
        book(CACHE, *self._sinks, *self._recent)
        self._sunk = self._fresh_sinks = self._start = self._stop = self._seen = self._prompt = self._prompt_rows = 0
        self.turn: Turn | None = None
        self.overflow: ActiveKV | None = None  # where a prompt's chunks are attended to for which there is no room
        self._overflows = False

    @classmethod
    def of(
        cls, keys: Tensor, values: Tensor, kept: Selection, slack: int, attention: Attention, sinks: int, limit: int
    ) -> RollingStore:
        """Of the rows `kept` of the `keys` and `values` [1, Hkv, S, D] of a whole prompt."""
        assert kept.counts is None
        held = kept.indices.shape[1]
        limit = max(limit, held)
        sinks = min(sinks, limit - 1)
        store = cls(keys, values, limit, sinks, max(held - sinks, 0) + max(slack, 1), attention)
        store.begin_at(held)
        store.hold((keys, values), kept.indices)
        return store

    def hold(self, given: tuple[Tensor, Tensor], indices: Tensor) -> None:
        """Take the rows `indices` [Hkv, K] of the keys and values [1, Hkv, S, D] of a whole prompt."""
        sunk, held = self._sunk, indices.shape[1]
        for rows, first, recent in zip(given, self._sinks, self._recent, strict=True):
            for head, index in enumerate(indices.unbind()):
                first[0, head, :sunk] = rows[0, head].index_select(0, index[:sunk])
                recent[0, head, : held - sunk] = rows[0, head].index_select(0, index[sunk:])
        self._seen = given[0].shape[2]
        self.prompt_ends()

    def begin_at(self, position: int) -> None:
        """As if so many tokens had been read, though their rows are not here yet."""
        self._seen, self._sunk, self._start = position, min(self._sinks[0].shape[2], position), 0
        self._stop = min(position - self._sunk, self._most)

    def prompt_ends(self) -> None:
        """What comes from here on is new, and finds room here."""
        self._prompt, self._prompt_rows, self.overflow = self._seen, self.length, None

    @property
    def keys(self) -> Tensor:
        """Those of the recent rows [1, Hkv, n, D]."""
        return self._slices()[0]

    @property
    def values(self) -> Tensor:
        """Likewise, [1, Hkv, n, Dv]."""
        return self._slices()[1]

    @property
    def length(self) -> int:
        """See `Store.length`."""
        return self._sunk + min(self._stop - self._start, self._most)

    @property
    def prompt_length(self) -> int:
        """See `Store.prompt_length`."""
        return self._prompt_rows

    @property
    def added(self) -> int:
        """See `Store.added`."""
        return self._seen - self._prompt

    @property
    def nbytes(self) -> int:
        """See `Store.nbytes`."""
        return sum(rows.nbytes for rows in (*self._sinks, *self._recent))

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """See `Store.append`. The first rows of a text that begins here are its sinks."""
        given, count = (keys, values), keys.shape[2]
        first = min(self._sinks[0].shape[2] - self._sunk, count) if self._seen == self._sunk else 0
        for held, rows in zip(self._sinks, given, strict=True):
            held[:, :, self._sunk : self._sunk + first] = rows[:, :, :first]
        self._sunk, self._fresh_sinks = self._sunk + first, first
        self._seen += count
        self._start = max(self._start, self._stop - self._most + 1)  # what the next query still sees
        needed = self._stop - self._start + count - first
        self._overflows = self.overflow is not None and needed > self._recent[0].shape[2]
        if self._overflows and self.overflow is not None:
            self.overflow.place(0, keys_only=False)
            self.overflow.append(*self._slices())
            self.overflow.append(keys[:, :, first:], values[:, :, first:])
            return keys, values
        self._make_room(count - first)
        for recent, rows in zip(self._recent, given, strict=True):
            recent[:, :, self._stop : self._stop + count - first] = rows[:, :, first:]
        self._stop += count - first
        return keys, values

    def _slices(self) -> tuple[Tensor, Tensor]:
        keys, values = (rows[:, :, self._start : self._stop] for rows in self._recent)
        return keys, values

    def _make_room(self, count: int) -> None:
        """For `count` rows after those that are held."""
        held, capacity = self._stop - self._start, self._recent[0].shape[2]
        most = self._most + _SPARE
        too_wide = capacity > max(most, held + count)  # since many tokens came at once
        if self._stop + count <= capacity and not too_wide:
            return
        if held + count > capacity or too_wide:
            more = max(held + count, min(capacity * 3 // 2, most))
            keys, values = (_moved(rows, self._start, held, _rows(rows, more)) for rows in self._recent)
            self._recent = keys, values
            book(CACHE, keys, values)
        else:
            for rows in self._recent:
                _moved(rows, self._start, held, rows)
        self._start, self._stop = 0, held

    def attend(self, queries: Tensor, scale: float, rule: Rule) -> Tensor:
        """See `Store.attend`."""
        count, first = queries.shape[2], self._fresh_sinks  # queries of sinks see no recent row
        wide = self.overflow if self._overflows else None
        keys, values = self._slices() if wide is None else (wide.keys, wide.values)
        parts = []
        if first < count:
            recent = replace(rule, visible=Visible(self._most), sinks=None)
            out, lse = self._attention.attend(queries[:, :, first:], keys, values, scale, recent)
            parts.append((F.pad(out, (0, 0, first, 0)), F.pad(lse, (first, 0), value=-inf)))
        if self._sunk:
            positions = torch.arange(self._seen - count, self._seen, device=queries.device)
            back = queries
            if self.turn is not None:
                back = self.turn(queries, (positions - (self._limit - 1)).clamp_(min=0))
            sink_keys, sink_values = (rows[:, :, : self._sunk] for rows in self._sinks)
            parts.append(few_keys(back, sink_keys, sink_values, scale, rule.softcap, self._seen - count))
        out, lse = parts[0] if len(parts) == 1 else merge(*parts)
        if wide is not None:
            self._start, self._stop = 0, min(keys.shape[2], self._most)
            for held, rows in zip(self._recent, (keys, values), strict=True):
                held[:, :, : self._stop] = rows[:, :, rows.shape[2] - self._stop :]
        return with_sinks(out, lse, rule.sinks)[0]

    def trim(self, rows: Selection) -> None:
        """Not for this store: no layer's budget may fall."""
        raise NotImplementedError

    def pretend(self, tokens: int) -> None:
        """See `Store.pretend`."""
        self._seen += tokens
        self._stop = min(self._stop + tokens, self._start + self._most, self._recent[0].shape[2])


def _rows(like: Tensor, rows: int) -> Tensor:
    return like.new_empty(1, like.shape[1], rows, like.shape[3])


def _moved(rows: Tensor, start: int, count: int, target: Tensor) -> Tensor:
    """Rows start .. start+count-1 in front of `target`, which may be the same tensor."""
    for head in range(rows.shape[1]):
        target[0, head, :count] = rows[0, head, start : start + count].clone()
    return target
