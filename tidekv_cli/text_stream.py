"""Token ids -> text as it becomes certain: whole characters only, nothing of a stop string. Knows no model."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from typing import Any

_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")


class TextStream:
    """Feed ids with `push`, read what may be shown; `stopped` tells that a stop string was met.

    What is shown adds up to the decoding of all ids at once. A character whose bytes are still incomplete is held
    back, and so is text that may begin a stop string.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        backend = tokenizer.backend_tokenizer
        decoder = {} if backend.decoder is None else json.loads(backend.decoder.__getstate__())
        self._text: _Bytes | _Groups = _Bytes() if decoder.get("type") == "ByteLevel" else _Groups(tokenizer)
        self._token = backend.id_to_token
        self._left_out = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """Add one token; returns the text that can be shown now, perhaps none."""
        token = None if token_id in self._left_out else self._token(token_id)
        return "" if token is None else self._show(self._text.push(token_id, token), final=False)

    def close(self) -> str:
        """What was held back, at the end of the answer."""
        if self.stopped:
            return ""
        return self._show(self._text.close(), final=True)

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


class _Bytes:
    """Byte-level vocabularies: each letter of a token stands for a byte, unless one of them stands for none."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, _id: int, token: str) -> str:
        try:
            data = bytes([_BYTE_OF[letter] for letter in token])
        except KeyError:
            data = token.encode()
        return self._decoder.decode(data)

    def close(self) -> str:
        return self._decoder.decode(b"", final=True)


class _Groups:
    """Other vocabularies. One invalid byte makes its whole run of byte tokens invalid, so that a run waits for its end.

    The group before is decoded along: a decoder strips the space before the first word.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._before: list[int] = []
        self._known = ""  # the text of `_before`
        self._open: list[int] = []

    def push(self, token_id: int, token: str) -> str:
        self._open.append(token_id)
        return "" if _BYTE.fullmatch(token) else self.close()

    def close(self) -> str:
        if not self._open:
            return ""
        new = self._decode(self._before + self._open)[len(self._known) :]
        self._before, self._open = self._open, []
        self._known = self._decode(self._before)
        return new

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _letters_of_bytes() -> dict[str, int]:
    """GPT-2's letters: bytes that print stand for themselves, the others take letters from 256 on, in order."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _letters_of_bytes()
