"""StreamingLLM: attention sinks and the most recent tokens, while the prompt is read and while the answer is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tidekv_cli.engine.selectors import Rolling
from tidekv_cli.engine.selectors.recent import Recent
from tidekv_cli.errors import UsageError

Positions = Literal["absolute", "slot"]


@dataclass(frozen=True, slots=True)
class Streaming(Recent):
    """The first `sinks` tokens and the most recent budget-sinks ones; each new token takes the place of the oldest.

    Source: Xiao et al., StreamingLLM (2024). Positions are those of the text, or with `slot` the places in the cache,
    as the authors number them: then sinks stay near, and there is no end to what can be generated.
    """

    sinks: int = 4
    positions: Positions = "absolute"

    def __post_init__(self) -> None:
        Recent.__post_init__(self)
        if self.positions not in ("absolute", "slot"):
            raise UsageError(f"positions={self.positions} is not known", "use positions=absolute or positions=slot")

    @property
    def rolling(self) -> Rolling | None:
        """See `Selector.rolling`."""
        return Rolling(self.sinks, self.positions == "slot")
