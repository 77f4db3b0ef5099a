"""StreamingLLM: attention sinks and the most recent tokens, while the prompt is read and while the answer is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from tidekv_cli.engine.selectors import LayerView, Rolling, Selection, Selector, shared_by_heads, span
from tidekv_cli.errors import UsageError

Positions = Literal["absolute", "slot"]


@dataclass(frozen=True, slots=True)
class Streaming(Selector):
    """The first `sinks` tokens and the most recent budget-sinks ones; each new token takes the place of the oldest.

    Source: Xiao et al., StreamingLLM (2024). Positions are those of the text, or with `slot` the places in the cache,
    as the authors number them: then sinks stay near, and there is no end to what can be generated.
    """

    sinks: int = 4
    positions: Positions = "absolute"

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise UsageError(f"sinks={self.sinks} is impossible", "use 0 or more")
        if self.positions not in ("absolute", "slot"):
            raise UsageError(f"positions={self.positions} is not known", "use positions=absolute or positions=slot")

    @property
    def mandatory_tokens(self) -> int:
        """The sinks and the newest token."""
        return self.sinks + 1

    @property
    def rolling(self) -> Rolling | None:
        """See `Selector.rolling`."""
        return Rolling(self.sinks, self.positions == "slot")

    def select(self, view: LayerView, budget: int) -> Selection:
        """See `Selector.select`."""
        heads, length, _ = view.keys.shape
        recent = span(length - (budget - self.sinks), length, view.keys)
        return shared_by_heads(torch.cat((span(0, self.sinks, view.keys), recent)), heads)
