"""Ada-KV: heads whose scores are spread out keep more rows than those with few high ones."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import inf
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tidekv_cli.engine.budgets.apportion import apportion
from tidekv_cli.engine.readback import numbers
from tidekv_cli.engine.scoring import finite, ranks
from tidekv_cli.engine.selectors import LayerView, Selection, Selector, span
from tidekv_cli.errors import UsageError


@dataclass(frozen=True, slots=True)
class AdaHeads:
    """A head gets (1 - alpha) of its count among the layer's best Hkv b rows, and alpha of the mean b.

    Source: Feng et al., Ada-KV (2024), alpha=0.2. b counts what is chosen by score, per head; what always stays comes
    on top. Rounded so that the layer's sum is exact; of equal scores the earlier row counts, then the earlier head. No
    head is left without a row.
    """

    alpha: float = 0.2
    ragged: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0.0 <= self.alpha <= 1.0:
            raise UsageError(f"alpha={self.alpha} is impossible", "use a number from 0 to 1")

    def select(self, selector: Selector, view: LayerView, budget: int) -> Selection:
        """See `HeadPolicy.select`."""
        ranking = selector.rank(view, budget)
        heads, length, _ = view.keys.shape
        chosen = ranking.chosen(length, budget)
        if chosen == 0:
            return selector.select(view, budget)
        always = budget - chosen
        first, last = span(0, ranking.first, view.keys), span(ranking.stop, length, view.keys)
        scores = finite(torch.cat(list(ranking.blocks), 1).float()).expand(heads, -1)
        counts = self._counts(scores, [scores.shape[1]] * heads, chosen)
        if always == 0:
            counts = _none_empty(counts)
        mark = scores.new_full((1,), float("inf"))
        rows, kept = [], []
        for head, count in zip(scores.unbind(), counts, strict=True):
            best = _best(head, count)
            rows += [first, best + ranking.first, last]
            kept += [mark.expand(len(first)), head[best], mark.expand(len(last))]
        return Selection(torch.cat(rows), torch.cat(kept), tuple(count + always for count in counts))

    def trim(self, selection: Selection, budget: int, mandatory: int) -> Selection:
        """See `HeadPolicy.trim`."""
        assert selection.scores is not None
        heads = selection.by_head(selection.scores)
        width = max(len(head) for head in heads)
        padded = torch.stack([F.pad(head, (0, width - len(head)), value=-inf) for head in heads])
        free = [len(head) - mandatory for head in heads]
        counts = [count + mandatory for count in self._counts(padded, free, budget - mandatory, mandatory)]
        rows = [_best(head, count) for head, count in zip(heads, counts, strict=True)]
        scores = [head[chosen] for head, chosen in zip(heads, rows, strict=True)]
        return Selection(torch.cat(rows), torch.cat(scores), tuple(counts))

    def _counts(self, scores: Tensor, most: list[int], mean: int, always: int = 0) -> list[int]:
        """Rows chosen of each head, `mean` on average and none above its `most`, from scores [H, n].

        `always` infinite scores a head are among them, and are not counted.
        """
        heads = len(scores)
        joint = scores.t().reshape(1, -1)  # a row's heads side by side: the earlier row first, then the earlier head
        best = ranks(joint).topk(heads * (mean + always), dim=1, sorted=False).indices[0] % heads
        taken = torch.full((heads,), -always, device=best.device).index_add_(0, best, torch.ones_like(best))
        counts = [int(count) for count in numbers(taken, [mean] * heads)]
        alpha = Fraction(str(self.alpha))  # as it was written: 0.2 is no float
        return apportion([(1 - alpha) * count + alpha * mean for count in counts], heads * mean, most)


def _none_empty(counts: list[int]) -> list[int]:
    """The same sum, which is at least one each, with a row of the fullest head for each that has none."""
    counts = list(counts)
    while 0 in counts:
        counts[counts.index(max(counts))] -= 1
        counts[counts.index(0)] += 1
    return counts


def _best(scores: Tensor, count: int) -> Tensor:
    """Rows of the `count` highest of scores [n], ascending; of equal ones the earlier."""
    return ranks(scores[None]).topk(count, dim=1, sorted=False).indices[0].sort().values
