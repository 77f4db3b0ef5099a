"""Which entries stay: one file and one class a selector. They see one layer's keys and what was seen of its queries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tidekv_cli.engine.observation import Observation, Observer, WindowObserver
from tidekv_cli.engine.scoring import StreamingTopK
from tidekv_cli.errors import UsageError

_BLOCKS_HELD = 2


@dataclass(frozen=True, slots=True)
class LayerView:
    """One layer's uncompressed `keys` [Hkv, S, D], in the order of their positions, and the block size b_s.

    `observation` is what the selector's observer took of the layer, None where it has none.
    """

    keys: Tensor
    observation: Observation | None
    score_block: int


@dataclass(frozen=True, slots=True)
class Selection:
    """Kept rows, int64, ascending in every head, and the float32 scores that they were kept for.

    There are no scores where rows have none, or where all that stay always do.

    `indices` and `scores` are [Hkv, K] where every head keeps as many. Where they differ, `counts` are the rows of
    each head, and both are [sum of counts], head after head.
    """

    indices: Tensor
    scores: Tensor | None = None
    counts: tuple[int, ...] | None = None

    def by_head(self, rows: Tensor) -> tuple[Tensor, ...]:
        """The part of each head in `rows`, which are like `indices`."""
        return rows.unbind() if self.counts is None else rows.split(list(self.counts))

    def picked(self, rows: Selection) -> Selection:
        """Of these the row numbers `rows`, with their scores."""
        if rows.counts is None:
            return Selection(self.indices.gather(1, rows.indices), rows.scores)
        heads = zip(self.by_head(self.indices), rows.by_head(rows.indices), strict=True)
        return Selection(torch.cat([mine[chosen] for mine, chosen in heads]), rows.scores, rows.counts)


@dataclass(frozen=True, slots=True)
class Ranking:
    """What each of the rows `first` .. `stop`-1 is worth; the rows before and after these always stay.

    `blocks` yields scores [H, n] float32 in order of the rows, together stop - first columns; H is Hkv, or 1 where all
    heads share one choice. It can be read once.
    """

    first: int
    stop: int
    blocks: Iterator[Tensor]

    def chosen(self, length: int, budget: int) -> int:
        """How many of the ranked rows stay where `budget` of `length` rows do.

        Raises `UsageError` where more rows than that always stay, which no selector may ask for.
        """
        always = length - (self.stop - self.first)
        if not always <= budget:
            raise UsageError(
                f"the selector always keeps {always} rows of {length}, and the budget is {budget}",
                "use a larger --budget; its mandatory_tokens should say so",
            )
        return budget - always


@dataclass(frozen=True, slots=True)
class Rolling:
    """All rows but the first `sinks` make room for new ones; with `slots`, places in the cache count as positions."""

    sinks: int
    slots: bool


class Selector(Protocol):
    """A rule for which entries stay. Subclasses that score by themselves need `select` alone, others `rank` alone.

    `window` is how many of the prompt's last queries it looks at, 0 for none; `mandatory_tokens` what it always keeps,
    which a budget must cover. `rolling` is not None for one that goes on dropping its oldest rows while tokens are
    generated.
    """

    @property
    def window(self) -> int:
        """Observation queries needed."""
        return 0

    @property
    def mandatory_tokens(self) -> int:
        """Always kept, within the budget."""
        return 1

    @property
    def rolling(self) -> Rolling | None:
        """How rows make room for new tokens; None where they do not."""
        return None

    def observer(self, length: int) -> Observer | None:
        """What watches the queries of each layer of a prompt of `length` tokens; None to watch none."""
        return WindowObserver(self.window, length) if self.window else None

    def rank(self, view: LayerView, budget: int) -> Ranking:
        """What each row is worth where heads keep `budget` rows on average; unscored selectors have none."""
        raise NotImplementedError

    def select(self, view: LayerView, budget: int) -> Selection:
        """Exactly `budget` rows a head; called only with mandatory_tokens <= budget <= S."""
        return best(self.rank(view, budget), view, budget)


def best(ranking: Ranking, view: LayerView, budget: int) -> Selection:
    """The rows that always stay and of the ranked ones the highest, `budget` a head; of equal ones the earlier."""
    heads, length, _ = view.keys.shape
    first = span(0, ranking.first, view.keys).expand(heads, -1)
    last = span(ranking.stop, length, view.keys).expand(heads, -1)
    count = ranking.chosen(length, budget)
    if count == 0:
        return Selection(torch.cat((first, last), 1))
    top = StreamingTopK(count, ranking.stop - ranking.first, _BLOCKS_HELD * view.score_block, first=ranking.first)
    for scores in ranking.blocks:
        top.push(scores.float())
    positions, kept = (rows.expand(heads, -1) for rows in top.result())
    always = kept.new_full((heads, 1), float("inf"))
    scores = torch.cat((always.expand(-1, first.shape[1]), kept, always.expand(-1, last.shape[1])), 1)
    return Selection(torch.cat((first, positions, last), 1), scores)


def without_first(blocks: Iterator[Tensor], count: int) -> Iterator[Tensor]:
    """Blocks [H, n] without their first `count` columns."""
    for block in blocks:
        left_out = min(count, block.shape[1])
        count -= left_out
        if left_out < block.shape[1]:
            yield block[:, left_out:]


def shared_by_heads(positions: Tensor, heads: int) -> Selection:
    """The same positions [K] for every head."""
    return Selection(positions.expand(heads, -1))


def span(start: int, stop: int, like: Tensor) -> Tensor:
    """Positions start .. stop-1 on the device of `like`."""
    return torch.arange(start, stop, device=like.device)
