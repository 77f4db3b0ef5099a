"""How kept entries are held: one file and one class a store. A store is one layer's compact cache, of one prompt."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from tidekv_cli.engine.attention import Attention, Rule
from tidekv_cli.engine.selectors import Selection


class Store(Protocol):
    """Rows that were kept of the prompt, and those of new tokens after them. Answers queries over all of them."""

    @property
    def length(self) -> int:
        """Rows held, the mean over KV heads, which is a whole number."""

    @property
    def prompt_length(self) -> int:
        """Those that were kept of the prompt."""

    @property
    def added(self) -> int:
        """Rows of new tokens that were taken since."""
        return self.length - self.prompt_length

    @property
    def nbytes(self) -> int:
        """Bytes held, room for new tokens included."""

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add rows [1, Hkv, n, D] of new tokens; returns what the layer is to pass on, which `attend` does not need."""

    def attend(self, queries: Tensor, scale: float, rule: Rule) -> Tensor:
        """Output [1, Hq, n, Dv] of the newest n tokens' queries over what `rule` leaves of the rows."""

    def trim(self, rows: Selection) -> None:
        """Keep only those row numbers of the prompt's; called before any token is added."""

    def pretend(self, tokens: int) -> None:
        """Count the rows of so many new tokens as there, without their contents: for simulation."""


class MakeStore(Protocol):
    """A kind of store. `step` is by how many rows it grows, `settled` from how many on attending takes no more."""

    @property
    def step(self) -> int:
        """In rows of the prompt."""
        return 1

    @property
    def settled(self) -> int:
        """Likewise; 0 where what attending takes does not depend on rows, or grows with them in a line."""
        return 0

    def __call__(self, keys: Tensor, values: Tensor, kept: Selection, slack: int, attention: Attention) -> Store:
        """Of the rows `kept` of `keys` and `values` [1, Hkv, S, D], with `slack` rows for new tokens to come."""
