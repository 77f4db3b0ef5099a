"""Text -> token ids and where each token begins, piece by piece, with the ids of the whole. Knows no template.

Two kinds of borders between pieces are exact. (1) The rules by which known models split words always end one between a
letter and a space, digit or plain punctuation, and never look back. (2) Byte pair encoding: tokens are the encoding of
their text if and only if each two neighbours are that of theirs. Merges go by rank, then from the left, and no merge
crosses a final border; so two neighbours merge alone as they do among others. Hence an encoding that sets out from a
token of another, and begins with that same token, continues it. Where neither is sure, the piece grows, if need be to
the whole text.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tidekv_cli.tokenizer_kind import LOWER, WORD_END, Kind, kind_of

Progress = Callable[[int], None]

PIECE = 1 << 15  # characters that go through at once
OVERLAP = 1 << 8  # characters of a piece that the next one repeats where the text has no sure border


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids, and for each the character at which it begins."""

    ids: list[int]
    starts: list[int]


def encode(
    tokenizer: Any,
    text: str,
    control: bool = False,
    continues: bool = False,
    progress: Progress | None = None,
    piece: int = PIECE,
    overlap: int = OVERLAP,
) -> Encoded:
    """The ids that `tokenizer` gives for the whole `text`, without tokens of its own around it.

    `control` recognises control tokens in the text; without it their text is cut where the vocabulary would make them
    of it all the same. `continues` says that other text comes before. `progress` is told how many characters are done.
    `overlap` must be longer than the tokens of the vocabulary.
    """
    kind = None if control else kind_of(tokenizer, text)
    if kind is None or (len(text) <= piece and not continues):
        whole = _call(tokenizer, text, control)
    else:
        whole = Encoded([], [])
        for part in _Pieces(tokenizer, kind, text, continues, piece, overlap).run():
            whole.ids.extend(part.ids)
            whole.starts.extend(part.starts)
            if progress is not None and part.starts:
                progress(part.starts[-1])
    if not control and not _control_ids(tokenizer).isdisjoint(whole.ids):
        whole = _cut_control(tokenizer, text, whole)
    if progress is not None:
        progress(len(text))
    return whole


def _control_ids(tokenizer: Any) -> set[int]:
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return special - {tokenizer.unk_token_id}


def _cut_control(tokenizer: Any, text: str, found: Encoded) -> Encoded:
    """The text in parts, each of which ends after the first letter of a control token; `found` where there is none."""
    names = [re.escape(str(tokenizer.added_tokens_decoder[index])) for index in _control_ids(tokenizer)]
    cuts = [match.start() + 1 for match in re.finditer(rf"(?={'|'.join(names)})", text)]
    if not cuts:  # tokens for bytes may be called control tokens
        return found
    whole = Encoded([], [])
    for begin, stop in pairwise([0, *cuts, len(text)]):
        part = _call(tokenizer, text[begin:stop], False, begin)
        whole.ids.extend(part.ids)
        whole.starts.extend(part.starts)
    return whole


def _call(tokenizer: Any, text: str, control: bool, offset: int = 0) -> Encoded:
    encoded = tokenizer(
        text, add_special_tokens=False, split_special_tokens=not control, return_offsets_mapping=True, verbose=False
    )
    return Encoded(encoded["input_ids"], [offset + begin for begin, _ in encoded["offset_mapping"]])


@dataclass(frozen=True, slots=True)
class _Window:
    """The encoding of text[begin:stop]; `sure` if its end is a border of the whole text's encoding."""

    stop: int
    sure: bool
    encoded: Encoded


class _Pieces:
    def __init__(self, tokenizer: Any, kind: Kind, text: str, continues: bool, piece: int, overlap: int) -> None:
        self._tokenizer, self._kind, self._text = tokenizer, kind, text
        self._continues, self._piece, self._overlap = continues, piece, max(overlap, kind.longest_added)
        self._backend = tokenizer.backend_tokenizer

    def run(self) -> Iterator[Encoded]:
        """Encodings that follow each other; the tokenizer is left as it was."""
        before = self._backend.normalizer, self._backend.pre_tokenizer
        try:
            yield from self._run()
        finally:
            self._backend.normalizer, self._backend.pre_tokenizer = before

    def _run(self) -> Iterator[Encoded]:
        begin, size = 0, self._piece
        window = self._window(begin, size)
        while True:
            if window.sure:
                yield window.encoded
                if window.stop == len(self._text):
                    return
                begin, size = window.stop, self._piece
                window = self._window(begin, size)
                continue
            following = self._continuation(begin, window)
            if following is None:
                size *= 2
                window = self._window(begin, size)
                continue
            index, begin, after = following
            yield Encoded(window.encoded.ids[:index], window.encoded.starts[:index])
            window, size = after, self._piece

    def _window(self, begin: int, size: int) -> _Window:
        stop, sure = self._stop(begin + size)
        kind, later = self._kind, begin > 0 or self._continues
        self._backend.normalizer = kind.later_normalizer() if begin else kind.normalizer
        self._backend.pre_tokenizer = kind.later_pre_tokenizer(first_only=not begin) if later else kind.pre_tokenizer
        return _Window(stop, sure, _call(self._tokenizer, self._text[begin:stop], False, begin))

    def _stop(self, place: int) -> tuple[int, bool]:
        """Where a piece that is to end at `place` or soon after ends, and whether that is a sure border."""
        text = self._text
        while place < len(text):
            if not self._kind.at_words:
                return place, False
            for found in WORD_END.finditer(text, place, place + self._piece):
                if not self._kind.inside_added(text, found.end()):
                    return found.end(), True
            if self._kind.in_runs and LOWER.fullmatch(text, max(place - 2 * self._overlap, 0), place):
                return place, False
            place += self._piece
        return len(text), True

    def _continuation(self, begin: int, window: _Window) -> tuple[int, int, _Window] | None:
        """A token of `window` with which the next one begins: its index, its place, and that next one."""
        starts = window.encoded.starts
        last = bisect_right(starts, window.stop - self._overlap) - 1
        for index in range(last, max(last - 8, 0), -1):
            place = starts[index]
            if place <= begin or not self._literal(window.encoded, index) or self._kind.inside_added(self._text, place):
                continue
            # A rule for words may take up to three letters after an apostrophe for one.
            if self._kind.at_words and not LOWER.fullmatch(self._text, max(place - 3, 0), window.stop):
                continue
            after = self._window(place, self._piece)
            if after.encoded.ids[:1] == window.encoded.ids[index : index + 1]:
                return index, place, after
        return None

    def _literal(self, encoded: Encoded, index: int) -> bool:
        """Whether a token is the text at its place: no byte of a character, no unknown, no space put in before."""
        token = self._backend.id_to_token(encoded.ids[index]).replace("▁", " ")
        return bool(token) and self._text.startswith(token, encoded.starts[index])
