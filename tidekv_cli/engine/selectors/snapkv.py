"""SnapKV: attention of the prompt's last queries predicts what generation will attend to."""

from __future__ import annotations

from dataclasses import dataclass

from tidekv_cli.engine.scoring import Pooling, pool_scores, window_scores
from tidekv_cli.engine.selectors import LayerView, Ranking, Selector, without_first
from tidekv_cli.engine.selectors.parameters import check_pool_kernel, check_sinks, check_window
from tidekv_cli.errors import UsageError


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
        check_window(self.window)
        check_sinks(self.sinks)
        check_pool_kernel(self.pool_kernel)
        if self.pool not in ("avg", "max"):
            raise UsageError(f"pool={self.pool} is not known", "use pool=avg or pool=max")

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
