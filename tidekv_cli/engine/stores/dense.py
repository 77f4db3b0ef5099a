"""Dense store: every head keeps the same number of rows, in one tensor each for keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tidekv_cli.engine.attention import Attention, Rule
from tidekv_cli.engine.ledger import CACHE, book
from tidekv_cli.engine.selectors import Selection
from tidekv_cli.engine.stores import MakeStore, Store


@dataclass(frozen=True, slots=True)
class Dense(MakeStore):
    """Makes dense stores: see `stores.MakeStore`."""

    def __call__(self, keys: Tensor, values: Tensor, kept: Selection, slack: int, attention: Attention) -> DenseStore:
        """Of the rows `kept`."""
        return DenseStore(keys, values, kept, slack, attention)


DENSE = Dense()


class DenseStore(Store):
    """One layer's compact cache: rows [1, Hkv, capacity, D], of which `length` are filled, `prompt_length` at first.

    `slack` rows are kept free for new tokens, so that decoding copies nothing; past them capacity grows by half.
    """

    def __init__(self, keys: Tensor, values: Tensor, kept: Selection, slack: int, attention: Attention) -> None:
        """Gather the rows `kept` of `keys` and `values` [1, Hkv, S, D]; every head keeps as many."""
        self._attention, self._slack = attention, slack
        self._take(keys, values, kept)

    def _take(self, keys: Tensor, values: Tensor, kept: Selection) -> None:
        assert kept.counts is None
        count = kept.indices.shape[1]
        rows = _room(keys, count + self._slack), _room(values, count + self._slack)
        _gather(keys, kept.indices, rows[0])
        _gather(values, kept.indices, rows[1])
        self._keys, self._values = rows  # both or none, should memory run out
        self._length = self._prompt_length = count
        book(CACHE, self._keys, self._values)

    def fill(self, keys: Tensor, values: Tensor, kept: Selection) -> None:
        """Hold the rows `kept` of `keys` and `values` [1, Hkv, L, D] instead of the old ones, in the same memory."""
        _gather(keys, kept.indices, self._keys)
        _gather(values, kept.indices, self._values)
        self._length = kept.indices.shape[1]

    def go_back(self, length: int) -> None:
        """Hold the first `length` rows only."""
        self._length = length

    def prompt_ends(self) -> None:
        """All that is held now is the prompt's."""
        self._prompt_length = self._length

    def trim(self, rows: Selection) -> None:
        """See `Store.trim`."""
        self._take(self.keys, self.values, rows)

    def pretend(self, tokens: int) -> None:
        """See `Store.pretend`."""
        self._length += tokens

    @property
    def length(self) -> int:
        """See `Store.length`."""
        return self._length

    @property
    def prompt_length(self) -> int:
        """See `Store.prompt_length`."""
        return self._prompt_length

    @property
    def keys(self) -> Tensor:
        """Filled key rows [1, Hkv, length, D]."""
        return self._keys[:, :, : self.length]

    @property
    def values(self) -> Tensor:
        """Filled value rows [1, Hkv, length, D]."""
        return self._values[:, :, : self.length]

    @property
    def nbytes(self) -> int:
        """Bytes held, slack included."""
        return self._keys.nbytes + self._values.nbytes

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add rows [1, Hkv, n, D] of new tokens; returns all filled rows."""
        stop = self.length + keys.shape[2]
        if stop > self._keys.shape[2]:
            extra = max(stop, self._keys.shape[2] * 3 // 2) - self.length
            self._keys, self._values = _grown(self.keys, extra), _grown(self.values, extra)
            book(CACHE, self._keys, self._values)
        self._keys[:, :, self.length : stop] = keys
        self._values[:, :, self.length : stop] = values
        self._length = stop
        return self.keys, self.values

    def attend(self, queries: Tensor, scale: float, rule: Rule) -> Tensor:
        """Output [1, Hq, n, Dv] of the newest n tokens' queries over what `rule` leaves of the filled rows."""
        return self._attention.attend(queries, self.keys, self.values, scale, rule)[0]


def _room(like: Tensor, rows: int) -> Tensor:
    _, heads, _, size = like.shape
    return like.new_empty(1, heads, rows, size)


def _gather(rows: Tensor, indices: Tensor, out: Tensor) -> None:
    """Rows [1, Hkv, L, D] at `indices` [Hkv, K] into the first K of `out`."""
    kept = out[0, :, : indices.shape[1]].unbind()
    for source, index, target in zip(rows[0].unbind(), indices.unbind(), kept, strict=True):
        torch.index_select(source, 0, index, out=target)


def _grown(rows: Tensor, extra: int) -> Tensor:
    length = rows.shape[2]
    out = _room(rows, length + extra)
    out[:, :, :length] = rows
    return out
