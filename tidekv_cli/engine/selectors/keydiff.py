"""KeyDiff: keys that point elsewhere than the others do are kept, without a look at any query."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor
from torch.linalg import vector_norm

from tidekv_cli.engine.selectors import LayerView, Ranking, Selector

_PART = 512  # keys in float32 at a time; not the score block, on which sums must not depend


@dataclass(frozen=True, slots=True)
class KeyDiff(Selector):
    """The keys that are least like the mean of a head's keys, whatever their position.

    Source: Park et al., KeyDiff (2025): score = -cos(key, anchor), the anchor being the mean of a head's keys, each
    scaled to length 1, positions applied. A key that is 0 has the cosine 0.
    """

    def rank(self, view: LayerView, budget: int) -> Ranking:
        """See `Selector.rank`."""
        return Ranking(0, view.keys.shape[1], _scores(view.keys))


def _scores(keys: Tensor) -> Iterator[Tensor]:
    """[Hkv, n] float32 in order of the keys [Hkv, S, D]."""
    anchor = keys.new_zeros(keys.shape[0], 1, keys.shape[2], dtype=torch.float64)
    for part in _of_length_one(keys):
        anchor += part.sum(1, keepdim=True, dtype=torch.float64)
    anchor /= vector_norm(anchor, dim=-1, keepdim=True).clamp_min_(torch.finfo(anchor.dtype).tiny)
    direction = anchor.float()
    for part in _of_length_one(keys):
        yield part.mul_(direction).sum(-1).neg_()


def _of_length_one(keys: Tensor) -> Iterator[Tensor]:
    """Some keys at a time, [Hkv, n, D] float32. The greatest number first becomes 1, so that no square overflows."""
    least = torch.finfo(torch.float32).tiny
    for part in keys.split(_PART, 1):
        rows = part.float()
        rows = rows / vector_norm(rows, inf, dim=-1, keepdim=True).clamp_min_(least)
        yield rows.div_(vector_norm(rows, dim=-1, keepdim=True).clamp_min_(least))
