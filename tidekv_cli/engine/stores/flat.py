"""Flat store: heads may keep different numbers of rows, all of them in one buffer each for keys and values.

A head's rows lie in whole pieces of a fixed size and fewer loose rows. The pieces of all heads, which are alike, are
one call of attention, with a piece where it else has a KV head; loose rows are so few that all queries go over those
of all heads, and other heads' are hidden. New tokens come to every head, and so lie in a dense store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tidekv_cli.engine.attention import Attention, Rule, capped
from tidekv_cli.engine.ledger import CACHE, book
from tidekv_cli.engine.selectors import Selection
from tidekv_cli.engine.stores import MakeStore, Store
from tidekv_cli.engine.stores.dense import DenseStore

_PIECE = 128  # rows: longer ones leave more loose rows, shorter ones are slower and more to merge
_QUERIES = 16  # at a time: each goes to every piece of its head, and has an output there


@dataclass(frozen=True, slots=True)
class Flat(MakeStore):
    """Makes flat stores, as `MakeStore`."""

    def __call__(self, keys: Tensor, values: Tensor, kept: Selection, slack: int, attention: Attention) -> FlatStore:
        """See `FlatStore`."""
        return FlatStore(keys, values, kept, slack, attention)


class FlatStore(Store):
    """One layer's compact cache: len_h rows of the prompt of each KV head h, and room for `slack` of new tokens."""

    def __init__(self, keys: Tensor, values: Tensor, kept: Selection, slack: int, attention: Attention) -> None:
        """Gather the rows `kept` of `keys` and `values` [1, Hkv, S, D], as many of each head as it says."""
        self._attention = attention
        self._old = _Rows(keys[0].unbind(), values[0].unbind(), kept.by_head(kept.indices))
        nothing = Selection(kept.indices.new_empty(keys.shape[1], 0))
        self._new = DenseStore(keys, values, nothing, slack, attention)

    @property
    def prompt_length(self) -> int:
        """Rows kept of the prompt, the mean over heads."""
        return self._old.count // self._old.heads

    @property
    def length(self) -> int:
        """Rows held, the mean over heads."""
        return self.prompt_length + self._new.length

    @property
    def nbytes(self) -> int:
        """Bytes held, slack and what tells the heads' rows apart included."""
        return self._old.nbytes + self._new.nbytes

    def trim(self, rows: Selection) -> None:
        """See `Store.trim`."""
        self._old = self._old.picked(rows.by_head(rows.indices))

    def pretend(self, tokens: int) -> None:
        """See `Store.pretend`."""
        self._new.pretend(tokens)

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add rows [1, Hkv, n, D] of new tokens; returns all new tokens' rows."""
        return self._new.append(keys, values)

    def attend(self, queries: Tensor, scale: float, rule: Rule) -> Tensor:
        """Output [1, Hq, n, Dv] of the newest n tokens' queries over all rows up to their own; `rule` hides none."""
        backend, plain = self._attention, Rule(softcap=rule.softcap)
        out, lse = backend.attend(queries, self._new.keys, self._new.values, scale, plain)
        if queries.shape[2] <= _QUERIES:
            return self._old.joined(queries, out, lse, scale, rule, backend)
        blocks = zip(queries.split(_QUERIES, 2), out.split(_QUERIES, 2), lse.split(_QUERIES, 2), strict=True)
        return torch.cat([self._old.joined(*block, scale, rule, backend) for block in blocks], 2)


class _Rows:
    """What is kept of the prompt: `count` rows of all heads together, keys [count, D] and values [count, Dv]."""

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
        """Of each head its `rows` of `keys` and `values` [*, D]."""
        counts = [len(head) for head in rows]
        self.heads, self.count = len(counts), sum(counts)
        self._pieces, self._loose = [n // _PIECE for n in counts], [n % _PIECE for n in counts]
        self._whole = sum(self._pieces)
        self._split = self._whole * _PIECE  # the first loose row
        self._keys, self._values = self._gathered(keys, rows), self._gathered(values, rows)
        self._owners, self._hidden = self._owner_of_pieces(rows[0].device), self._others(rows[0].device)
        book(CACHE, self._keys, self._values, self._owners, self._hidden)

    @property
    def nbytes(self) -> int:
        """Of rows, and of what tells whose they are."""
        return sum(held.nbytes for held in (self._keys, self._values, self._owners, self._hidden))

    def picked(self, rows: Sequence[Tensor]) -> _Rows:
        """Those whose numbers within their head are in `rows`."""
        places = []
        starts = zip(self._spans(), rows, strict=True)
        for (pieces, loose), head in starts:
            held = pieces.stop - pieces.start
            places.append(torch.where(head < held, head + pieces.start, head + (loose.start - held)))
        return _Rows([self._keys] * self.heads, [self._values] * self.heads, places)

    def joined(
        self, queries: Tensor, out: Tensor, lse: Tensor, scale: float, rule: Rule, attention: Attention
    ) -> Tensor:
        """Output [1, Hq, n, Dv] over these rows and others, of which `out` and `lse` [1, Hq, n] are known.

        All `queries` [1, Hq, n, D] see all of these rows.
        """
        (count, size), width, whole = queries.shape[2:], self._values.shape[1], self._whole
        grouped = queries.reshape(self.heads, -1, size)  # [Hkv, G n, D]
        rows = grouped.shape[1]
        merged = [lse.reshape(self.heads, rows, 1)]
        if whole:
            asked = grouped.index_select(0, self._owners[:whole]).view(1, -1, 1, size)
            keys, values = (held[: self._split].view(1, whole, _PIECE, -1) for held in (self._keys, self._values))
            found, sums = attention.attend(asked, keys, values, scale, Rule(softcap=rule.softcap))
            merged.append(sums.view(whole, rows).t().expand(self.heads, -1, -1))
        merged.append(self._loose_logits(grouped, scale, rule.softcap))
        if rule.sinks is not None:  # one more key, without a value
            merged.append(rule.sinks.to(lse.dtype)[:, None].expand(-1, count).reshape(self.heads, rows, 1))
        shares = torch.cat(merged, 2)
        held = 1 + whole + self.count - self._split
        shares[:, :, :held].masked_fill_(self._hidden[:, :, :held], float("-inf"))
        shares = shares.softmax(2)
        total = shares[:, :, 1 + whole : held] @ self._values[self._split :].float()
        total += out.reshape(self.heads, rows, width) * shares[:, :, :1]
        if whole:
            outputs = found.view(whole, rows, width).float().transpose(0, 1)  # [G n, pieces, Dv]
            total += (shares[:, :, 1 : 1 + whole].transpose(0, 1) @ outputs).transpose(0, 1)
        return total.view(1, -1, count, width).to(queries.dtype)

    def _loose_logits(self, grouped: Tensor, scale: float, softcap: float | None) -> Tensor:
        """[Hkv, G n, loose rows] of queries [Hkv, G n, D], those of other heads' rows among them."""
        logits = grouped.flatten(0, 1).float() @ self._keys[self._split :].float().t() * scale
        return capped(logits, softcap).view(*grouped.shape[:2], -1)

    def _spans(self) -> list[tuple[slice, slice]]:
        """Of each head, the rows in pieces and the loose ones."""
        found, piece, loose = [], 0, self._split
        for pieces, rest in zip(self._pieces, self._loose, strict=True):
            found.append((slice(piece, piece + pieces * _PIECE), slice(loose, loose + rest)))
            piece, loose = piece + pieces * _PIECE, loose + rest
        return found

    def _gathered(self, sources: Sequence[Tensor], rows: Sequence[Tensor]) -> Tensor:
        out = sources[0].new_empty(self.count, sources[0].shape[1])
        for source, head, (pieces, loose) in zip(sources, rows, self._spans(), strict=True):
            held = pieces.stop - pieces.start
            torch.index_select(source, 0, head[:held], out=out[pieces])
            torch.index_select(source, 0, head[held:], out=out[loose])
        return out

    def _owner_of_pieces(self, device: torch.device) -> Tensor:
        """The head of each; room for as many as any way of sharing out the rows makes, so that bytes are foreseen."""
        owners = torch.zeros(self.count // _PIECE, dtype=torch.long, device=device)
        for head, (pieces, _) in enumerate(self._spans()):
            owners[pieces.start // _PIECE : pieces.stop // _PIECE] = head
        return owners

    def _others(self, device: torch.device) -> Tensor:
        """bool [Hkv, 1, 1 + pieces + loose rows]: what is another head's, after a first that is not. Room likewise."""
        most = 1 + self.count // _PIECE + self.heads * (_PIECE - 1)
        others = torch.ones(self.heads, 1, most, dtype=torch.bool, device=device)
        others[:, :, 0] = False
        after = 1 + self._whole - self._split
        for own, (pieces, loose) in zip(others, self._spans(), strict=True):
            own[:, 1 + pieces.start // _PIECE : 1 + pieces.stop // _PIECE] = False
            own[:, loose.start + after : loose.stop + after] = False
        return others
