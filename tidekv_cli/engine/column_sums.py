"""How much attention each key of a prompt gets from all queries, summed up as chunks come. Knows no budget."""

from __future__ import annotations

import torch
from torch import Tensor

from tidekv_cli.engine.attention import capped
from tidekv_cli.engine.ledger import SCORING, births_booked
from tidekv_cli.engine.observation import Observation
from tidekv_cli.engine.readback import is_fake
from tidekv_cli.engine.scoring import grouped, window_scores

_LOGITS = 1 << 22  # at a time: 16 MiB in float32
_KEYS, _MOST_QUERIES = 1024, 128
_BLOCK = 8 * _KEYS


class ColumnSums:
    """An observer of all queries: `Observation.column_sums` [Hkv, S] float32 of a prompt of `length` S.

    Key j of a head gets the sum of exp(q_i k_j scale - lse_i) over the queries i >= j of its group. Two tensors of that
    shape are held, so that the newest chunk, which may be caught again, can be forgotten.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._settled: Tensor | None = None  # of the chunks before the newest
        self._newest: Tensor | None = None
        self._start: int | None = None  # of the newest chunk
        self._seen: Observation | None = None

    @property
    def first(self) -> int:
        """See `Observer.first`."""
        return 0

    @property
    def blocks_of(self) -> int:
        """See `Observer.blocks_of`. One block's sums are there while the next one's are made."""
        return 2 * _BLOCK

    def catch(
        self, queries: Tensor, keys: Tensor, lse: Tensor, start: int, scale: float, softcap: float | None = None
    ) -> None:
        """See `Observer.catch`."""
        heads, count = queries.shape[1:3]
        rows = max(min(_LOGITS // (_KEYS * heads), _MOST_QUERIES), 1)
        with births_booked(SCORING):
            if self._start is not None and self._start < start:
                self._settle()
            self._newest = self._start = None
            newest = keys.new_zeros(keys.shape[1], self._length, dtype=torch.float32)
            self._newest, self._start = newest, start
            starts = range(0, count, rows)
            for at in starts[-2:] if is_fake(keys) else starts:  # none before these takes more memory
                own = slice(at, at + rows)
                _add(newest, keys[0], Observation(queries[0, :, own], lse[0, :, own], scale, softcap), start + at)
            self._seen = Observation(queries.new_empty(heads, 0, queries.shape[3]), None, scale, softcap)

    def _settle(self) -> None:
        """The newest chunk came to its end. Done whole or not at all, should memory run out."""
        assert self._newest is not None
        self._settled = self._newest if self._settled is None else self._settled.add_(self._newest)
        self._newest = self._start = None

    def take(self) -> Observation:
        """See `Observer.take`."""
        if self._start is not None:
            self._settle()
        taken, sums = self._seen, self._settled
        assert taken is not None
        taken.column_sums = sums
        self._seen = self._settled = None
        return taken


def _add(sums: Tensor, keys: Tensor, seen: Observation, start: int) -> None:
    """To `sums` [Hkv, S] the weights that queries at `start` and on give to `keys` [Hkv, L, D]."""
    heads, (query_heads, rows, _) = keys.shape[0], seen.queries.shape
    at = 0
    for mean in window_scores(keys, seen, start, _BLOCK):
        sums[:, at : at + mean.shape[1]].add_(mean, alpha=query_heads // heads * rows)
        at += mean.shape[1]
    sums[:, start : start + rows] += _among_themselves(keys[:, start : start + rows], seen)


def _among_themselves(keys: Tensor, seen: Observation) -> Tensor:
    """The weights [Hkv, n] that n queries give to the keys [Hkv, n, D] at their own positions: each up to its own."""
    heads, rows, _ = keys.shape
    assert seen.lse is not None
    logits = capped(grouped(seen, heads) @ keys.float().transpose(1, 2), seen.softcap)  # [Hkv, G n, n]
    weights = logits.sub_(seen.lse.reshape(heads, -1, 1)).exp_().view(heads, -1, rows, rows)
    return weights.tril_().sum((1, 2))
