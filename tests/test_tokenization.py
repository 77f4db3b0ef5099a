"""Tokenization by pieces: the ids and places of the whole, for every kind of tokenizer, in time that grows in line."""

from __future__ import annotations

import random
import time

import pytest

from tests.tokenizer_kinds import GAPS, KINDS, SPECIAL, SYLLABLES, made_up_text, tokenizer_of
from tidekv_cli.tokenization import PIECE, Encoded, encode
from tidekv_cli.tokenizer_kind import kind_of

ADDED = ("\n\n", "the", "<tool>", "<tool_call>", "  ")
UNCUT = ("unigram",)  # of these it is not known where they could be cut
UNCUT_IN_WORDS = ("deepseek",)


def control_text(kind: str) -> list[str]:
    """A Unigram model makes control tokens of their text, which is not wanted: see the tests of prompts."""
    return [] if kind == "unigram" else SPECIAL


def whole(tokenizer: object, text: str) -> Encoded:
    encoded = tokenizer(
        text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True, verbose=False
    )
    return Encoded(encoded["input_ids"], [begin for begin, _ in encoded["offset_mapping"]])


@pytest.mark.parametrize("added", [(), ADDED], ids=["plain", "added"])
@pytest.mark.parametrize("kind", KINDS)
def test_random_texts_in_tiny_pieces(kind: str, added: tuple[str, ...]) -> None:
    tokenizer, source = tokenizer_of(kind, added), random.Random(kind)
    for seed in range(300):
        text = made_up_text(seed, source.randrange(1, 300))
        if seed % 3 == 0:
            text += source.choice([*control_text(kind), *ADDED, "<tool"]) + made_up_text(seed + 1000, 40)
        piece = source.randrange(1, 90)
        assert encode(tokenizer, text, piece=piece, overlap=13) == whole(tokenizer, text), (seed, piece, text)


@pytest.mark.parametrize("kind", KINDS)
def test_runs_and_repetitions(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    units = [
        *SYLLABLES,
        *GAPS,
        *control_text(kind),
        "ab",
        "abc",
        "aab",
        "the",
        " the",
        "A",
        "Ab",
        "\u0301",
        "🇩🇪",
        "'ll",
        "'",
        "1a",
    ]
    for unit in units:
        for count in (1, 40, 333):
            for text in (
                unit * count,
                "ba" + unit * count,
                "'lo" * 3 + unit * count + "'s\n x",
                " " * 50 + unit * count,
            ):
                assert encode(tokenizer, text, piece=64, overlap=13) == whole(tokenizer, text), (unit, count)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in UNCUT])
def test_a_text_is_really_cut(kind: str) -> None:
    tokenizer, text, told = tokenizer_of(kind), "Some words, and then " * 200, []
    before = tokenizer.backend_tokenizer.normalizer, tokenizer.backend_tokenizer.pre_tokenizer
    states = [step and step.__getstate__() for step in before]
    assert encode(tokenizer, text, progress=told.append, piece=100) == whole(tokenizer, text)
    assert told == sorted(told) and told[-1] == len(text) and len(told) > 20
    after = tokenizer.backend_tokenizer.normalizer, tokenizer.backend_tokenizer.pre_tokenizer
    assert [step and step.__getstate__() for step in after] == states


def test_an_interrupt_leaves_the_tokenizer_as_it_was() -> None:
    tokenizer, text = tokenizer_of("llama2"), "Some words, and then " * 200

    def interrupt(_done: int) -> None:
        raise KeyboardInterrupt

    expected = whole(tokenizer, text)
    with pytest.raises(KeyboardInterrupt):
        encode(tokenizer, text, progress=interrupt, piece=100)
    assert whole(tokenizer, text) == expected


@pytest.mark.parametrize("kind", ["mistral", "llama2", "gemma", "gpt2"])
def test_text_that_comes_after_a_control_token(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    for text in ("the lo", " the lo", "\nthe", "", " ", "ba" * 300, made_up_text(3, 200)):
        together = tokenizer("<s>" + text, add_special_tokens=False)["input_ids"]
        assert encode(tokenizer, text, continues=True, piece=64, overlap=13).ids == together[1:]


def test_what_is_not_known_is_not_cut() -> None:
    from tokenizers import AddedToken, normalizers, pre_tokenizers

    text = "Some words"
    assert kind_of(tokenizer_of("gpt2"), text) is not None
    assert kind_of(tokenizer_of("unigram"), text) is None
    for change in (
        {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)},
        {"pre_tokenizer": pre_tokenizers.Split(" ", "isolated")},
        {"normalizer": normalizers.Lowercase()},
    ):
        tokenizer = tokenizer_of("gpt2")
        for name, value in change.items():
            setattr(tokenizer.backend_tokenizer, name, value)
        assert kind_of(tokenizer, text) is None
    tokenizer = tokenizer_of("gpt2")
    tokenizer.backend_tokenizer.add_tokens([AddedToken("word", single_word=True)])
    assert kind_of(tokenizer, text) is None
    assert kind_of(tokenizer, "Other") is not None


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in UNCUT + UNCUT_IN_WORDS])
def test_time_grows_in_line_with_a_line_without_spaces(kind: str) -> None:
    tokenizer, source = tokenizer_of(kind), random.Random(0)
    line = "".join(source.choice("aeiounrst") for _ in range(400_000))
    assert encode(tokenizer, line) == whole(tokenizer, line)

    def least(size: int) -> float:
        times = []
        for _ in range(5):
            began = time.process_time()
            encode(tokenizer, line[:size])
            times.append(time.process_time() - began)
        return min(times)

    assert len(line) > 4 * PIECE
    assert least(400_000) <= 4.5 * least(100_000)
