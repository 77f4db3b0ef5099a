"""`all`: nothing is evicted, the control for every other selector."""

from __future__ import annotations

from dataclasses import dataclass

from tidekv_cli.engine.selectors import LayerView, Selection, Selector, shared_by_heads, span


@dataclass(frozen=True, slots=True)
class KeepAll(Selector):
    """Every prompt token stays, whatever the budget."""

    @property
    def mandatory_tokens(self) -> int:
        """Any budget will do: it is not used."""
        return 0

    def select(self, view: LayerView, budget: int) -> Selection:
        """See `Selector.select`."""
        heads, length, _ = view.keys.shape
        return shared_by_heads(span(0, length, view.keys), heads)
