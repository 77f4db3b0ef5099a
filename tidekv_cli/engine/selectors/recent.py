"""Recent: what stays is decided by position alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tidekv_cli.engine.selectors import LayerView, Selection, Selector, shared_by_heads, span
from tidekv_cli.engine.selectors.parameters import check_sinks


@dataclass(frozen=True, slots=True)
class Recent(Selector):
    """The first `sinks` tokens and the most recent budget-sinks ones, at their own positions: the sliding control."""

    sinks: int = 0

    def __post_init__(self) -> None:
        check_sinks(self.sinks)

    @property
    def mandatory_tokens(self) -> int:
        """The sinks and the newest token."""
        return self.sinks + 1

    def select(self, view: LayerView, budget: int) -> Selection:
        """See `Selector.select`."""
        heads, length, _ = view.keys.shape
        recent = span(length - (budget - self.sinks), length, view.keys)
        return shared_by_heads(torch.cat((span(0, self.sinks, view.keys), recent)), heads)
