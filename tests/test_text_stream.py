"""Streaming text: whole characters, the same text as decoding at once, stop strings across tokens."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.builders import sentencepiece_metadata
from tests.tokenizer_kinds import KINDS, tokenizer_of
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


def random_ids(tokenizer: Any, source: random.Random) -> list[int]:
    """Any tokens, runs of the same few, bytes above all, and ids beyond the vocabulary."""
    size = len(tokenizer)
    few = [source.randrange(size) for _ in range(3)]
    return [
        source.choice([source.randrange(size), source.choice(few), source.randrange(min(size, 260)), size + 5])
        for _ in range(source.randrange(1, 40))
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_random_tokens_add_up_to_the_whole_decoding(kind: str) -> None:
    tokenizer, source = tokenizer_of(kind, ("<tool>", "é", " x")), random.Random(kind)
    for _ in range(1000):
        ids = random_ids(tokenizer, source)
        pieces = pushed(TextStream(tokenizer), ids)
        whole = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert "".join(pieces) == whole, tokenizer.convert_ids_to_tokens(ids)


def test_valid_bytes_are_shown_at_the_end_of_their_run() -> None:
    tokenizer = tokenizer_of("llama2")
    euro = tokenizer.convert_tokens_to_ids(["<0xE2>", "<0x82>", "<0xAC>"])
    stream = TextStream(tokenizer)
    x = tokenizer.convert_tokens_to_ids("x")
    assert [stream.push(token) for token in [*euro, x, *euro[:2], x]] == ["", "", "", "€x", "", "", "\ufffd\ufffdx"]


def test_bytes_are_shown_as_soon_as_they_are_whole() -> None:
    tokenizer = tokenizer_of("gpt2")
    ids = tokenizer.convert_tokens_to_ids(["â", "Ĥ", "¬", "â", "x"])
    stream = TextStream(tokenizer)
    assert [stream.push(token) for token in ids] == ["", "", "€", "", "\ufffdx"]


@pytest.mark.parametrize(("kind", "token"), [("gpt2", "â"), ("gpt2", "Ĥ"), ("llama2", "<0xE2>"), ("gemma", "ba")])
def test_a_push_takes_no_longer_as_the_answer_grows(kind: str, token: str) -> None:
    tokenizer = tokenizer_of(kind)
    token_id = tokenizer.convert_tokens_to_ids(token)
    decoded = 0

    class Counting:
        backend_tokenizer = tokenizer.backend_tokenizer
        added_tokens_decoder = tokenizer.added_tokens_decoder

        def decode(self, ids: list[int], **settings: Any) -> str:
            nonlocal decoded
            decoded += len(ids)
            return tokenizer.decode(ids, **settings)

    stream = TextStream(Counting())
    shown = "".join(stream.push(token_id) for _ in range(3000)) + stream.close()
    assert shown == tokenizer.decode([token_id] * 3000)
    assert decoded <= 4 * 3000
