"""CAKE: layers whose attention is spread out and restless keep more, as far as the layers read so far tell."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import exp, inf, log
from typing import ClassVar

import torch
from torch import Tensor

from tidekv_cli.engine.budgets import LayerBudgets, Layers
from tidekv_cli.engine.budgets.apportion import apportion
from tidekv_cli.engine.readback import numbers
from tidekv_cli.engine.scoring import window_scores
from tidekv_cli.engine.selectors import LayerView
from tidekv_cli.errors import UsageError

_PLANNED = 1.0  # of every layer in a plan, which knows no data
_LEAST_TAU = 1e-3
_OTHER = "use --selector snapkv, or another --budget-policy"
_GREATEST = 700.0  # exp() of more is no float


@dataclass(frozen=True, slots=True)
class Cake:
    """Budgets in proportion to H^(1/tau1) V^(1/tau2) of the window's attention to the keys before it.

    H is its entropy and V its variance over the window's queries, both summed over heads and keys. The whole total is
    shared among the layers that were read so far, so earlier ones are trimmed again as later ones are read.
    Source: Qin et al., CAKE (2025), with its tau for Llama-3.1 at 1,024 tokens.
    """

    tau1: float = 1.6
    tau2: float = 0.4
    revises: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not (_LEAST_TAU <= self.tau1 < inf and _LEAST_TAU <= self.tau2 < inf):
            raise UsageError(
                f"tau1={self.tau1}, tau2={self.tau2} is impossible", f"use finite numbers from {_LEAST_TAU} on"
            )

    def begin(self, layers: Layers) -> LayerBudgets:
        """See `LayerPolicy.begin`."""
        return _Preferences(self, layers)

    def borders(self, layers: Layers, read: Collection[int]) -> Sequence[int]:
        """See `LayerPolicy.borders`. The layers read so far share the whole total, and hold all until it is less."""
        total = layers.count * max(layers.budget - layers.mandatory, 0)
        bends = {layers.mandatory + total // count for count in (1, *read) if 0 < count < layers.count}
        return 2 * layers.budget, *sorted(bends)

    def preference(self, view: LayerView) -> float:
        """Of one layer. Not negative; what is no number, as of a window of one query, is 0. Raises `UsageError`."""
        if view.observation is None:
            raise UsageError("policy cake needs what the last queries saw, which the selector does not look at", _OTHER)
        entropy, variance = numbers(_entropy_and_variance(view), (_PLANNED, _PLANNED))
        if not (entropy > 0 and variance > 0):
            return 0.0
        return exp(min(log(entropy) / self.tau1 + log(variance) / self.tau2, _GREATEST))


def _entropy_and_variance(view: LayerView) -> Tensor:
    """Both [2] float64. Sums over keys are in float64, so that they do not depend on the blocks."""
    observation = view.observation
    assert observation is not None  # see `preference`
    window = observation.queries.shape[1]
    rows = observation.queries.shape[0] // view.keys.shape[0] * window
    totals = view.keys.new_zeros(2, dtype=torch.float64)

    def add(weights: Tensor, _scores: Tensor) -> None:
        whole = weights * rows
        totals[0] -= torch.special.xlogy(whole, whole).sum(2).sum(dtype=torch.float64)
        if window > 1:
            totals[1] += whole.unflatten(2, (-1, window)).var(3).sum(dtype=torch.float64)

    for _ in window_scores(view.keys, observation, max(view.keys.shape[1] - window, 0), view.score_block, add):
        pass
    return totals


@dataclass(slots=True)
class _Preferences:
    """Of the layers read so far, and their budgets without the rows that always stay."""

    policy: Cake
    layers: Layers
    found: list[float] = field(default_factory=list)
    free: list[int] = field(default_factory=list)

    def read(self, layer: int, view: LayerView | None) -> Sequence[int]:
        layers, preference = self.layers, _PLANNED if view is None else self.policy.preference(view)
        self.found += [_PLANNED] * (layer - len(self.found))  # layers that a simulation leaves out
        self.found.append(preference)
        most = [*self.free, *[layers.free_most] * (layer + 1 - len(self.free))]
        self.free = apportion(self.found, layers.free_total, most)
        always = min(layers.mandatory, layers.length)
        return [always + rows for rows in self.free]
