"""Streaming text: whole characters, the same text as decoding at once, stop strings across tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.builders import sentencepiece_metadata
from tidekv_cli.gguf_file import GgufFile
from tidekv_cli.gguf_tokenizer import build_tokenizer
from tidekv_cli.text_stream import TextStream

TEXTS = [
    "Plain words, then more.",
    "ünïcödé — 💧🌊 漢字かな",
    " leading",
    "line\n\nbreaks\t",
    "👨‍👩‍👧 family \ufffd done",
]


def pushed(stream: TextStream, ids: list[int]) -> list[str]:
    shown = []
    for token in ids:
        shown.append(stream.push(token))
        if stream.stopped:
            break
    return [*shown, stream.close()]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_whole(embedded_tokenizer: Any, text: str) -> None:
    ids = embedded_tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = pushed(TextStream(embedded_tokenizer), ids)
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize(
    "text", [*TEXTS[:4], "東京漢字 the", "the東the京 hello漢字漢字漢字", "é", "💧 and 💧💧💧💧💧 the", "hello hello"]
)
def test_byte_fallback_pieces_join_to_the_whole(text: str) -> None:
    tokenizer = build_tokenizer(GgufFile(Path("some/model.gguf"), sentencepiece_metadata(), {}))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = pushed(TextStream(tokenizer), ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)


def test_incomplete_bytes_at_the_end_are_shown_once(embedded_tokenizer: Any) -> None:
    ids = embedded_tokenizer("ok 💧", add_special_tokens=False)["input_ids"][:-1]
    pieces = pushed(TextStream(embedded_tokenizer), ids)
    assert "".join(pieces) == embedded_tokenizer.decode(ids)


@pytest.mark.parametrize("stop", ["then", "words, th", ",", "n more.", "Plain"])
def test_stop_strings(embedded_tokenizer: Any, stop: str) -> None:
    ids = embedded_tokenizer(TEXTS[0], add_special_tokens=False)["input_ids"]
    stream = TextStream(embedded_tokenizer, ["never seen", stop])
    pieces = pushed(stream, ids)
    assert "".join(pieces) == TEXTS[0][: TEXTS[0].index(stop)]
    assert stream.stopped


def test_what_only_looked_like_a_stop_is_shown(embedded_tokenizer: Any) -> None:
    ids = embedded_tokenizer(TEXTS[0], add_special_tokens=False)["input_ids"]
    stream = TextStream(embedded_tokenizer, ["more...", "words; "])
    assert "".join(pushed(stream, ids)) == TEXTS[0]
    assert not stream.stopped
