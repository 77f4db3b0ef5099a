"""CAKE's scores: keys that the window attends to, or that its queries disagree about."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tidekv_cli.engine.scoring import pool_scores, window_scores
from tidekv_cli.engine.selectors import LayerView, Ranking, Selector
from tidekv_cli.engine.selectors.parameters import check_pool_kernel, check_window
from tidekv_cli.errors import UsageError

_MOST_GAMMA = 1e9


@dataclass(frozen=True, slots=True)
class CakeScore(Selector):
    """The window, and the keys with the highest mean + `gamma` x variance of attention over the window's queries.

    Source: Qin et al., CAKE (2025), gamma=200. Of each query head, the variance unbiased, 0 for a window of one; then
    average pooling over the S-W keys before the window, zeros past both ends, and the mean over a group's heads.
    """

    window: int = 32
    gamma: float = 200.0
    pool_kernel: int = 5

    def __post_init__(self) -> None:
        check_window(self.window)
        check_pool_kernel(self.pool_kernel)
        if not 0.0 <= self.gamma <= _MOST_GAMMA:
            raise UsageError(f"gamma={self.gamma} is impossible", f"use a number from 0 to {_MOST_GAMMA:g}")

    @property
    def mandatory_tokens(self) -> int:
        """The window."""
        return self.window

    def rank(self, view: LayerView, budget: int) -> Ranking:
        """See `Selector.rank`. The mean over a group comes before the pooling, which is linear, so it is the same."""
        assert view.observation is not None
        prefix = view.keys.shape[1] - self.window
        seen = view.observation.queries.shape[1]  # fewer than the window where a chunk is shorter
        combine = partial(self._mean_and_variance, seen)
        raw = window_scores(view.keys, view.observation, prefix, view.score_block, combine)
        return Ranking(0, prefix, pool_scores(raw, self.pool_kernel, "avg"))

    def _mean_and_variance(self, seen: int, weights: Tensor, scores: Tensor) -> None:
        """See `scoring.Combine`; of so many queries."""
        torch.sum(weights, 2, out=scores)
        if seen > 1:
            by_head = (weights * weights.shape[2]).unflatten(2, (-1, seen))  # [Hkv, n, G, W], undivided
            scores.add_(by_head.var(3).mean(2).mul_(self.gamma))
