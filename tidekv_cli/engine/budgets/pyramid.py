"""PyramidKV: early layers keep more than late ones."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from tidekv_cli.engine.budgets import LayerBudgets, Layers
from tidekv_cli.engine.budgets.apportion import apportion
from tidekv_cli.engine.budgets.uniform import Fixed
from tidekv_cli.errors import UsageError


@dataclass(frozen=True, slots=True)
class Pyramid:
    """Budgets fall in a line from the first layer to the last, which gets a `beta`th of the mean b = K - W.

    Source: Cai et al., PyramidKV (2024): least = b // beta, greatest = 2 b - least. What the first layers cannot hold,
    because the prompt is shorter, goes to the others.
    """

    beta: int = 20
    revises: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.beta < 1:
            raise UsageError(f"beta={self.beta} is impossible", "use 1 or more")

    def begin(self, layers: Layers) -> LayerBudgets:
        """See `LayerPolicy.begin`."""
        if not layers.count:  # every layer has a window of its own
            return Fixed([])
        always = min(layers.mandatory, layers.length)
        mean = Fraction(layers.free_total, layers.count)
        least = mean // self.beta
        step = 2 * (mean - least) / max(layers.count - 1, 1)
        line = [2 * mean - least - step * layer for layer in range(layers.count)] if layers.count > 1 else [mean]
        return Fixed([always + rows for rows in apportion(line, layers.free_total, [layers.free_most] * layers.count)])

    def borders(self, layers: Layers, read: Collection[int]) -> Sequence[int]:
        """See `LayerPolicy.borders`."""
        return (2 * layers.budget,)
