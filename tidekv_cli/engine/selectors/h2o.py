"""H2O: keys that all of the prompt's queries together attended to most, and the most recent ones."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from tidekv_cli.engine.column_sums import ColumnSums
from tidekv_cli.engine.observation import Observer
from tidekv_cli.engine.selectors import LayerView, Ranking, Selector
from tidekv_cli.errors import UsageError


@dataclass(frozen=True, slots=True)
class H2O(Selector):
    """Of the budget the part `recent`, rounded down but at least one row, is the newest tokens; the rest heavy hitters.

    Source: Zhang et al., H2O (2023), half and half. A key's score is its attention weight summed over all queries that
    see it, and over a group's heads.
    """

    recent: float = 0.5

    def __post_init__(self) -> None:
        if not 0.0 <= self.recent <= 1.0:
            raise UsageError(f"recent={self.recent} is impossible", "use a number from 0 to 1")

    def observer(self, length: int) -> Observer:
        """See `Selector.observer`."""
        return ColumnSums(length)

    def rank(self, view: LayerView, budget: int) -> Ranking:
        """See `Selector.rank`."""
        assert view.observation is not None and view.observation.column_sums is not None
        # The part as it was written: 0.29 is no float, and 100 times it would be 28.
        before = view.keys.shape[1] - max(int(budget * Fraction(str(self.recent))), 1)
        sums = view.observation.column_sums[:, :before]
        return Ranking(0, before, iter(sums.split(view.score_block, 1)))
