"""How many entries stay, in rows a KV head: how a total is shared out over layers, and over a layer's heads.

Only layers that see everything take part: what others keep is decided by their own window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tidekv_cli.engine.selectors import LayerView, Selection, Selector
from tidekv_cli.errors import UsageError


@dataclass(frozen=True, slots=True)
class Layers:
    """What is shared out: `count` layers of at most `length` rows, of which each keeps `mandatory` in any case.

    The mean of their budgets is `budget`, in rows a head, mandatory rows among them.
    """

    count: int
    length: int
    mandatory: int
    budget: int

    @property
    def free_total(self) -> int:
        """Rows that are shared out, of all layers together."""
        return self.count * (min(self.budget, self.length) - min(self.mandatory, self.length))

    @property
    def free_most(self) -> int:
        """Rows that one layer may get of them."""
        return self.length - min(self.mandatory, self.length)


class LayerBudgets(Protocol):
    """The budgets of one prompt, as its layers are read one after another."""

    def read(self, layer: int, view: LayerView | None) -> Sequence[int]:
        """Rows of the layers 0 .. `layer`, which was just read; those of earlier ones may only have fallen.

        Without a view, what is planned with.
        """


class LayerPolicy(Protocol):
    """Shares rows over layers. Budgets sum up to count x min(budget, length) exactly, once all layers are read."""

    @property
    def revises(self) -> bool:
        """Whether a layer's budget may fall once later ones are read."""

    def begin(self, layers: Layers) -> LayerBudgets:
        """For one prompt."""

    def borders(self, layers: Layers) -> Sequence[int]:
        """Prompt lengths, ascending, at which a layer's budget stops growing with the prompt, whatever `layers.length`.

        Between them budgets are straight lines over the length.
        """


class HeadPolicy(Protocol):
    """Shares a layer's rows over its KV heads."""

    @property
    def ragged(self) -> bool:
        """Whether heads may keep different numbers of rows."""

    def select(self, selector: Selector, view: LayerView, budget: int) -> Selection:
        """`budget` rows a head on average, exactly; called only with mandatory_tokens <= budget <= S."""

    def trim(self, selection: Selection, budget: int, mandatory: int) -> Selection:
        """Row numbers within `selection`, which has scores, of the `budget` rows a head that stay of it."""


@dataclass(frozen=True, slots=True)
class BudgetPolicy:
    """Both, with the budget in rows a head."""

    budget: int
    layers: LayerPolicy
    heads: HeadPolicy

    def select(self, selector: Selector, view: LayerView, budget: int) -> Selection:
        """As `HeadPolicy.select`. Raises `UsageError` for a selector that keeps more or less than it was told to."""
        selection, (heads, _, _) = self.heads.select(selector, view, budget), view.keys.shape
        if selection.indices.numel() != heads * budget:
            kept = selection.indices.numel() / heads
            raise UsageError(
                f"selector {type(selector).__name__} keeps {kept:g} rows a head, and the budget is {budget}",
                "repair or remove the package that offers it",
            )
        return selection
