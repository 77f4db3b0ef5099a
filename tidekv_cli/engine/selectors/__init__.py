"""Which entries stay: one file and one class a selector. They see one layer's keys and what the window saw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tidekv_cli.engine.scoring import Observation


@dataclass(frozen=True, slots=True)
class LayerView:
    """One layer's uncompressed `keys` [Hkv, S, D], its `observation` where asked for, and the block size b_s."""

    keys: Tensor
    observation: Observation | None
    score_block: int


@dataclass(frozen=True, slots=True)
class Selection:
    """Kept positions [Hkv, K], int64, ascending, and the scores [Hkv, K] they were kept for (None if unscored)."""

    indices: Tensor
    scores: Tensor | None = None


class Selector(Protocol):
    """A rule for which entries stay.

    `window` is the number of last queries it needs (0: none); `mandatory_tokens` what it always keeps, which a
    budget must cover.
    """

    @property
    def window(self) -> int:
        """Observation queries needed."""

    @property
    def mandatory_tokens(self) -> int:
        """Always kept, within the budget."""

    def select(self, view: LayerView, budget: int) -> Selection:
        """Exactly `budget` positions per head; called only with mandatory_tokens <= budget <= S."""


def shared_by_heads(positions: Tensor, heads: int) -> Selection:
    """The same positions [K] for every head."""
    return Selection(positions.expand(heads, -1))


def span(start: int, stop: int, like: Tensor) -> Tensor:
    """Positions start .. stop-1 on the device of `like`."""
    return torch.arange(start, stop, device=like.device)
