"""Uniform: every layer, and every head, keeps as many rows."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tidekv_cli.engine.budgets import LayerBudgets, Layers
from tidekv_cli.engine.scoring import ranks
from tidekv_cli.engine.selectors import LayerView, Selection, Selector


@dataclass(frozen=True, slots=True)
class EvenLayers:
    """K_l = K for every layer."""

    revises: ClassVar[bool] = False

    def begin(self, layers: Layers) -> LayerBudgets:
        """See `LayerPolicy.begin`."""
        return Fixed([min(layers.budget, layers.length)] * layers.count)

    def borders(self, layers: Layers, read: Collection[int]) -> Sequence[int]:
        """See `LayerPolicy.borders`."""
        return (layers.budget,)


@dataclass(frozen=True, slots=True)
class Fixed:
    """Known before anything is read."""

    rows: list[int]

    def read(self, layer: int, view: LayerView | None) -> Sequence[int]:
        return self.rows[: layer + 1]


@dataclass(frozen=True, slots=True)
class EvenHeads:
    """Every head of a layer keeps as many rows."""

    ragged: ClassVar[bool] = False

    def select(self, selector: Selector, view: LayerView, budget: int) -> Selection:
        """See `HeadPolicy.select`."""
        return selector.select(view, budget)

    def trim(self, selection: Selection, budget: int, mandatory: int) -> Selection:
        """See `HeadPolicy.trim`."""
        assert selection.scores is not None
        rows = ranks(selection.scores).topk(budget, dim=1, sorted=False).indices.sort(dim=1).values
        return Selection(rows, selection.scores.gather(1, rows))
