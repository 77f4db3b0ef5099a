"""What is seen of a layer's queries while it is read. Knows no budget and no cache layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(slots=True)
class Observation:
    """What the last W queries saw: `queries` [Hq, W, D] and, where the backend gives it, `lse` [Hq, W] float32.

    `softcap` is the layer's, as `attention.Rule` has it. `column_sums` [Hkv, S] float32, of an observer of all queries,
    are each key's attention weights summed over them and over a group's heads.
    """

    queries: Tensor
    lse: Tensor | None
    scale: float
    softcap: float | None = None
    column_sums: Tensor | None = None


class Observer(Protocol):
    """Watches the attention of one layer after another."""

    @property
    def first(self) -> int:
        """The position of the first query that it must see."""

    @property
    def blocks_of(self) -> int:
        """Keys that it looks at at a time: a shorter prompt takes less, a longer one in a straight line more."""

    def catch(
        self, queries: Tensor, keys: Tensor, lse: Tensor, start: int, scale: float, softcap: float | None = None
    ) -> None:
        """See a chunk: `queries` [1, Hq, n, D] from position `start` on, `keys` [1, Hkv, L, D] so far, LSE [1, Hq, n].

        What was caught from `start` on before, of a chunk that did not come to its end, is forgotten.
        """

    def take(self) -> Observation:
        """What was seen of the layer that just ended; the next layer starts empty."""


class WindowObserver:
    """Keeps the rows of the last `window` positions of a prompt of `length`, across chunks if need be."""

    def __init__(self, window: int, length: int) -> None:
        self._first = length - min(window, length)
        self._seen: dict[int, tuple[Tensor, Tensor]] = {}  # queries and LSE by their first position
        self._scale = 1.0
        self._softcap: float | None = None

    @property
    def first(self) -> int:
        """See `Observer.first`."""
        return self._first

    @property
    def blocks_of(self) -> int:
        """See `Observer.blocks_of`. It only keeps queries."""
        return 0

    def catch(
        self, queries: Tensor, keys: Tensor, lse: Tensor, start: int, scale: float, softcap: float | None = None
    ) -> None:
        """See `Observer.catch`."""
        stop = start + queries.shape[2]
        if stop <= self._first:
            return
        for stale in [position for position in self._seen if position >= start]:
            del self._seen[stale]
        skip = max(self._first - start, 0)
        self._seen[start] = queries[0, :, skip:].clone(), lse[0, :, skip:].clone()
        self._scale, self._softcap = scale, softcap

    def take(self) -> Observation:
        """See `Observer.take`."""
        queries, lse = zip(*self._seen.values(), strict=True)
        taken = Observation(torch.cat(queries, 1), torch.cat(lse, 1), self._scale, self._softcap)
        self._seen = {}
        return taken
