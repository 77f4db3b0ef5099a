"""The selector itself: rows are worth more the nearer they are to the middle of the prompt."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tidekv_cli.engine.selectors import LayerView, Ranking, Selector
from tidekv_cli.errors import UsageError


@dataclass(frozen=True, slots=True)
class Middle(Selector):
    """The last `window` tokens, and of the others those nearest to the middle."""

    window: int = 8

    def __post_init__(self) -> None:
        if self.window < 1:
            raise UsageError(f"window={self.window} is impossible", "use 1 or more")

    @property
    def mandatory_tokens(self) -> int:
        """The window."""
        return self.window

    def observer(self, length: int) -> None:
        """No queries are needed: the window is one of positions only."""

    def rank(self, view: LayerView, budget: int) -> Ranking:
        """Minus the distance to the middle, in blocks of the size that was asked for."""
        heads, length, _ = view.keys.shape
        stop = length - self.window
        places = torch.arange(stop, device=view.keys.device, dtype=torch.float32)
        scores = -(places - length / 2).abs().expand(heads, -1)
        return Ranking(0, stop, iter(scores.split(view.score_block, 1)))
