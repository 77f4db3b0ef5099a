"""SnapKV: attention of the prompt's last queries predicts what generation will attend to."""

from __future__ import annotations

from dataclasses import dataclass

from tidekv_cli.engine.scoring import Pooling, pool_scores, window_scores
from tidekv_cli.engine.selectors import LayerView, Ranking, Selector, without_first
from tidekv_cli.errors import UsageError

_WIDEST_POOL = 1023


@dataclass(frozen=True, slots=True)
class SnapKV(Selector):
    """The window, the first `sinks` tokens, and the keys that the window attended to most.

    Source: Li et al., SnapKV (2024), with the LongBench settings by default (W=32, max pooling over 7). Softmax in
    float32; mean over the window and over a group's heads, then pooling over the S-W keys before the window.
    """

    window: int = 32
    pool: Pooling = "max"
    pool_kernel: int = 7
    sinks: int = 0

    def __post_init__(self) -> None:
        if self.window < 1 or self.sinks < 0:
            raise UsageError(
                f"window={self.window}, sinks={self.sinks} is impossible",
                "window is at least 1, sinks at least 0",
            )
        if self.pool not in ("avg", "max"):
            raise UsageError(f"pool={self.pool} is not known", "use pool=avg or pool=max")
        if not 1 <= self.pool_kernel <= _WIDEST_POOL or self.pool_kernel % 2 == 0:
            raise UsageError(
                f"pool_kernel={self.pool_kernel} is impossible", f"use an odd number from 1 to {_WIDEST_POOL}"
            )

    @property
    def mandatory_tokens(self) -> int:
        """Window and sinks."""
        return self.window + self.sinks

    def rank(self, view: LayerView, budget: int) -> Ranking:
        """See `Selector.rank`. Sinks take part in pooling, not in the choice."""
        assert view.observation is not None
        prefix = view.keys.shape[1] - self.window
        raw = window_scores(view.keys, view.observation, prefix, view.score_block)
        pooled = pool_scores(raw, self.pool_kernel, self.pool)
        return Ranking(self.sinks, prefix, without_first(pooled, self.sinks))
