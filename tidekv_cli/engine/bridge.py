"""The hidden bridge: the prompt's hidden states between two layers, slots overwritten in place."""

from __future__ import annotations

from torch import Tensor

from tidekv_cli.engine.ledger import BRIDGE, book


class Bridge:
    """Hidden states [1, S, d] of one prompt, written and read chunk by chunk."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._rows: Tensor | None = None

    def chunk(self, start: int, stop: int) -> Tensor:
        """Rows start .. stop-1, [1, n, d]."""
        assert self._rows is not None
        return self._rows[:, start:stop]

    def put(self, start: int, hidden: Tensor) -> None:
        """Write `hidden` [1, n, d] over the rows from `start`; a whole prompt takes the old one's place uncopied."""
        stop = start + hidden.shape[1]
        if stop - start == self._length:
            self._rows = hidden
            book(BRIDGE, hidden)
            return
        if self._rows is None:
            self._rows = hidden.new_empty(1, self._length, hidden.shape[2])
            book(BRIDGE, self._rows)
        self._rows[:, start:stop] = hidden
