"""Text -> token ids and where each token begins, piece by piece, with the ids of the whole. Knows no template.

Two kinds of borders between pieces are exact. (1) The rules by which known models split words always end one between a
letter and a space, digit or plain punctuation, and never look back. (2) Byte pair encoding: tokens are the encoding of
their text if and only if each two neighbours are that of theirs. Merges go by rank, then from the left, and no merge
crosses a final border; so two neighbours merge alone as they do among others. Hence an encoding that sets out from a
token of another, and begins with that same token, continues it. Where neither is sure, the piece grows, if need be to
the whole text.

A Unigram model gets the whole text: between ways to split that score alike it chooses by how sums from the beginning of
the text were rounded, so that a piece by itself may be split otherwise.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tidekv_cli.tokenizer_kind import Kind, kind_of, without_prefix

Progress = Callable[[int], None]

PIECE = 1 << 15  # characters that go through at once
OVERLAP = 1 << 8  # characters of a piece that the next one repeats where the text has no sure border
_ASCII_LETTERS = re.compile("[A-Za-z]*")


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
    backend = _Backend(tokenizer)
    try:
        whole = _encode(backend, text, control, continues, progress, piece, overlap)
        if not control and not _control_ids(tokenizer).isdisjoint(whole.ids):
            whole = _cut_control(backend, text, whole, continues)
    finally:
        backend.restore()
    if progress is not None:
        progress(len(text))
    return whole


def _encode(
    backend: _Backend, text: str, control: bool, continues: bool, progress: Progress | None, piece: int, overlap: int
) -> Encoded:
    kind = None if control else kind_of(backend.tokenizer, text)
    if kind is None or len(text) <= piece:
        return backend.call(text, control, continues).encoded
    whole = Encoded([], [])
    try:
        for part in _Pieces(backend, kind, text, continues, piece, overlap).run():
            whole.ids.extend(part.ids)
            whole.starts.extend(part.starts)
            if progress is not None and part.starts:
                progress(part.starts[-1])
    except _BorderMoved:
        return backend.call(text, control, continues).encoded
    return whole


def _control_ids(tokenizer: Any) -> set[int]:
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return special - {tokenizer.unk_token_id}


def _cut_control(backend: _Backend, text: str, found: Encoded, continues: bool) -> Encoded:
    """The text in parts, each of which ends after the first letter of a control token; `found` where there is none."""
    decoder = backend.tokenizer.added_tokens_decoder
    names = [re.escape(str(decoder[index])) for index in _control_ids(backend.tokenizer)]
    cuts = [match.start() + 1 for match in re.finditer(rf"(?={'|'.join(names)})", text)]
    if not cuts:  # tokens for bytes may be called control tokens
        return found
    whole = Encoded([], [])
    for begin, stop in pairwise([0, *cuts, len(text)]):
        part = backend.call(text[begin:stop], False, continues, begin).encoded
        whole.ids.extend(part.ids)
        whole.starts.extend(part.starts)
    return whole


class _BorderMoved(Exception):
    """A longer piece begins with another token than the shorter one by which it was joined to the text before."""


@dataclass(frozen=True, slots=True)
class _Call:
    """What the tokenizer made of a text, and its own object for questions about single tokens."""

    encoded: Encoded
    details: Any


class _Backend:
    """A tokenizer of which the space that it puts before a text is under control, until `restore`."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        if self.backend is not None:
            first = self.backend.normalizer, self.backend.pre_tokenizer
            continued = tuple(without_prefix(component, first_only=True) for component in first)
            later = tuple(without_prefix(component) for component in first)
            self._components = first, continued, later
            self._now = 0

    def call(self, text: str, control: bool, continues: bool, offset: int = 0) -> _Call:
        """Encode a text that lies `offset` characters behind the front of one that `continues` another, or does not."""
        if self.backend is not None:
            self._switch(2 if offset else int(continues))
        encoded = self.tokenizer(
            text, add_special_tokens=False, split_special_tokens=not control, return_offsets_mapping=True, verbose=False
        )
        starts = [offset + begin for begin, _ in encoded["offset_mapping"]]
        return _Call(Encoded(encoded["input_ids"], starts), encoded)

    def restore(self) -> None:
        """Leave the tokenizer as it was."""
        if self.backend is not None:
            self._switch(0)

    def _switch(self, which: int) -> None:
        if which != self._now:
            self.backend.normalizer, self.backend.pre_tokenizer = self._components[which]
            self._now = which


@dataclass(frozen=True, slots=True)
class _Window:
    """The encoding of text[begin:stop]; `sure` if its end is a border of the whole text's encoding."""

    stop: int
    sure: bool
    encoded: Encoded
    details: Any


class _Pieces:
    def __init__(self, backend: _Backend, kind: Kind, text: str, continues: bool, piece: int, overlap: int) -> None:
        self._backend, self._kind, self._text = backend, kind, text
        self._continues, self._piece, self._overlap = continues, piece, max(overlap, kind.longest_added)
        self._unknown = backend.tokenizer.unk_token_id
        self._letters_end = 0  # of the run of ASCII letters looked at last

    def run(self) -> Iterator[Encoded]:
        """Encodings that follow each other. Raises `_BorderMoved` where some that were given may be wrong."""
        begin, size, joined = 0, self._piece, False
        window = self._window(begin, size)
        while True:
            if window.sure:
                yield window.encoded
                if window.stop == len(self._text):
                    return
                begin, size, joined = window.stop, self._piece, False
                window = self._window(begin, size)
                continue
            following = self._continuation(begin, window)
            if following is None:
                size *= 2
                longer = self._window(begin, size)
                if joined and longer.encoded.ids[:1] != window.encoded.ids[:1]:
                    raise _BorderMoved
                window = longer
                continue
            index, begin, after = following
            yield Encoded(window.encoded.ids[:index], window.encoded.starts[:index])
            window, size, joined = after, self._piece, True

    def _window(self, begin: int, size: int) -> _Window:
        stop, sure = self._stop(begin + size)
        called = self._backend.call(self._text[begin:stop], False, self._continues, begin)
        return _Window(stop, sure, called.encoded, called.details)

    def _stop(self, place: int) -> tuple[int, bool]:
        """Where a piece that is to end at `place` or soon after ends, and whether that is a sure border."""
        text, words = self._text, self._kind.words
        while place < len(text):
            if words is None:
                return place, False
            for found in words.end.finditer(text, place, place + self._piece):
                if not self._kind.inside_added(text, found.end()):
                    return found.end(), True
            if words.run.fullmatch(text, max(place - 2 * self._overlap, 0), place):
                return place, False
            place += self._piece
        return len(text), True

    def _continuation(self, begin: int, window: _Window) -> tuple[int, int, _Window] | None:
        """A token of `window` with which the next one begins: its index, its place, and that next one."""
        starts = window.encoded.starts
        last = bisect_right(starts, window.stop - self._overlap) - 1
        for index in range(last, max(last - 8, 0), -1):
            place = starts[index]
            if place <= begin or not self._may_continue(begin, window, index):
                continue
            after = self._window(place, self._piece)
            if after.encoded.ids[:1] == window.encoded.ids[index : index + 1]:
                return index, place, after
        return None

    def _may_continue(self, begin: int, window: _Window, index: int) -> bool:
        """Whether the text from a token on is split into words, and into characters, as it is after what precedes."""
        text, words, place = self._text, self._kind.words, window.encoded.starts[index]
        if window.encoded.ids[index] == self._unknown:
            return False  # several unknown characters may be one token
        _, before_end = window.details.token_to_chars(index - 1)
        if begin + before_end > place or self._kind.inside_added(text, place):
            return False  # it begins inside a character
        if words is None:
            return True
        if not words.run.fullmatch(text, max(place - 3, 0), window.stop):
            return False
        if words.digits_apart and text[place].isdecimal():
            return bool(window.details.token_to_word(index - 1) != window.details.token_to_word(index))
        if not words.ascii_apart or not _ASCII_LETTERS.fullmatch(text[place]):
            return True
        if place >= self._letters_end:
            found = _ASCII_LETTERS.match(text, place)
            self._letters_end = found.end() if found else place
        return text[self._letters_end : self._letters_end + 1].isascii()
