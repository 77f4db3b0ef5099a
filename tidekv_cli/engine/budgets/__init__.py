"""How many entries stay, in rows a KV head: how a total is shared out over layers, and over a layer's heads.

Only layers that see everything take part: what others keep is decided by their own window.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tidekv_cli.engine.readback import numbers
from tidekv_cli.engine.selectors import LayerView, Selection, Selector
from tidekv_cli.errors import TideError, UsageError, is_out_of_memory


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

    def borders(self, layers: Layers, read: Collection[int]) -> Sequence[int]:
        """Prompt lengths, ascending, at which budgets bend, whatever `layers.length`: between them they are lines.

        Of the budgets as they are once so many layers are `read`, and when all are.
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
        """As `HeadPolicy.select`. Raises `UsageError` for a selector that fails, or keeps what it was not told to."""
        try:
            selection = self.heads.select(selector, view, budget)
        except TideError:
            raise
        except Exception as error:  # another package's code may raise anything
            if is_out_of_memory(error):
                raise
            raise _unfit(selector, f"fails: {type(error).__name__}: {error}") from error
        heads, length, _ = view.keys.shape
        if selection.indices.numel() != heads * budget:
            kept = selection.indices.numel() / heads
            raise _unfit(selector, f"keeps {kept:g} rows a head, and the budget is {budget}")
        if selection.scores is None and budget < length and not _ascends(selection, length):
            raise _unfit(selector, "keeps rows that do not ascend, or are not there")
        if self.layers.revises:
            self._check_always(selector, selection, heads, budget)
        return selection

    def _check_always(self, selector: Selector, selection: Selection, heads: int, budget: int) -> None:
        """What may be trimmed later has scores below infinity, and what must not is as much as the selector said."""
        least, always = selector.mandatory_tokens, budget
        if selection.scores is not None:
            always = int(numbers((selection.scores == torch.inf).sum()[None], [heads * least])[0]) // heads
        if always != least:
            raise _unfit(selector, f"always keeps {always} rows a head, and its mandatory_tokens are {least}")


def _unfit(selector: Selector, what: str) -> UsageError:
    return UsageError(
        f"selector {type(selector).__name__} {what}", "repair or remove the package that offers it, or file a bug"
    )


def _ascends(selection: Selection, length: int) -> bool:
    """Whether each head's rows are in order, and of the `length` that there are."""
    faults = [
        ((rows.diff() < 1).any() | (rows[:1] < 0).any() | (rows[-1:] >= length).any()).float()
        for rows in selection.by_head(selection.indices)
    ]
    return numbers(torch.stack(faults).sum()[None], [0.0])[0] == 0
