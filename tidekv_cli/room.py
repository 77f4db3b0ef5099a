"""Whether memory that others share is still there for the next chunk. Where it is not, the kernel kills unasked."""

from __future__ import annotations

import time
from collections.abc import Callable

from tidekv_cli.units import format_bytes

_MARGIN = 32 << 20
_SECONDS = 0.1  # reading is not free, and memory does not vanish faster than it is written


class Room:
    """Asked before every chunk. `read` gives the bytes available now, None where that cannot be read."""

    def __init__(self, read: Callable[[], int | None], needed_bytes: int, chunk_tokens: int) -> None:
        """`needed_bytes` is what one chunk of `chunk_tokens` is planned to need beside what is held."""
        self._read = read
        self._each = needed_bytes / chunk_tokens
        self._next = 0.0
        self._asked = 0

    def shortage(self, tokens: int) -> str | None:
        """Why a chunk of `tokens` may not fit, None if it does."""
        now = time.monotonic()
        if now < self._next and tokens == self._asked:
            return None
        needed, available = round(self._each * tokens) + _MARGIN, self._read()
        if available is not None and available < needed:
            return f"{format_bytes(available)} are available, a chunk of {tokens} tokens needs {format_bytes(needed)}"
        self._next, self._asked = now + _SECONDS, tokens
        return None
