"""How many entries stay: one class a budget policy, in tokens. Knows no selector and no store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class BudgetPolicy(Protocol):
    """Shares the KV tokens out over layers; the mean over layers is the stated budget."""

    def layer_budget(self, layer: int) -> int:
        """Tokens kept per KV head of `layer`, at most; a shorter prompt keeps everything."""


@dataclass(frozen=True, slots=True)
class Uniform:
    """K_l = K for every layer."""

    budget_tokens: int

    def layer_budget(self, layer: int) -> int:
        """See `BudgetPolicy.layer_budget`."""
        return self.budget_tokens
