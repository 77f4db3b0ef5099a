"""Token ids -> text as it becomes certain: whole characters only, nothing of a stop string. Knows no model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class TextStream:
    """Feed ids with `push`, read what may be shown; `stopped` tells that a stop string was met.

    A character whose bytes are still incomplete is held back, and so is text that may begin a stop string.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stops = [stop for stop in stops if stop]
        self._ids: list[int] = []
        self._context = 0  # where the newest text that was decoded for good begins, always at a whole character
        self._settled = 0  # and where it ends
        self._held = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """Add one token; returns the text that can be shown now, perhaps none."""
        self._ids.append(token_id)
        return self._show(self._new_text(), final=False)

    def close(self) -> str:
        """What was held back, at the end of the answer."""
        if self.stopped:
            return ""
        return self._show(self._new_text(final=True), final=True)

    def _new_text(self, final: bool = False) -> str:
        # Decoding the text before along keeps a tokenizer from stripping the space before a word.
        known = self._decode(self._ids[self._context : self._settled])
        text = self._decode(self._ids[self._context :])
        if text.endswith("\ufffd") and not final:
            return ""
        new = text[len(known) :]
        if new:
            self._context = self._settled
        self._settled = len(self._ids)
        return new

    def _decode(self, ids: list[int]) -> str:
        return str(
            self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) if ids else ""
        )

    def _show(self, new: str, final: bool) -> str:
        text = self._held + new
        found = [place for place in (text.find(stop) for stop in self._stops) if place >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = 0 if final else self._possible_start(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string may begin."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0
