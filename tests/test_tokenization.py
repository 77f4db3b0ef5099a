"""Tokenization by pieces: the ids and places of the whole, for every kind of tokenizer, in time that grows in line."""

from __future__ import annotations

import random
import re
import time

import pytest

from tests.planning import marked
from tests.tokenizer_kinds import GAPS, KINDS, SPECIAL, SYLLABLES, made_up_text, tokenizer_of
from tidekv_cli.tokenization import PIECE, Encoded, encode
from tidekv_cli.tokenizer_kind import kind_of

ADDED = ("\n\n", "the", "<tool>", "<tool_call>", "  ")
# Of these it is not known where they could be cut: they get the whole text, in the time that the tokenizer takes.
UNCUT = ("unigram", "across-spaces", "across-spaces-digits", "across-spaces-numbers")
LINES = {
    "lower": "aeiounrst",
    "upper": "ACGT",
    "mixed": "abcdeABCDE",
    "han": "漢字水火木金土",
    "kana": "かなのはカタ",
    "hangul": "한국어가나",
    "digits": "0123456789",
    "sign": "=",
    "signs": "=-*#",
    "spaces": " ",
}
# Characters that a vocabulary neither has nor spells in bytes are one unknown token, however long: no border in it.
UNCUT_LINES = {"llama2-unknown": ("upper", "hangul", "sign", "signs")}


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
    assert all(kind_of(tokenizer_of(kind), text) is None for kind in UNCUT)
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


@pytest.mark.parametrize("overlap", [1, 5, 13])
@pytest.mark.parametrize("kind", KINDS)
def test_runs_inside_words_in_tiny_pieces(kind: str, overlap: int) -> None:
    """Overlaps shorter than tokens too: then borders move as a piece grows, and that is noticed."""
    tokenizer, source = tokenizer_of(kind), random.Random(kind)
    alphabets = [*LINES.values(), "ab", "abé", "漢字a", "1a", "=-'", "aé", "!ab", "'lreAB", " \n= ", "ΑαБб"]
    for seed in range(60):
        parts = []
        for _ in range(source.randrange(1, 4)):
            letters = source.choice(alphabets)
            parts += [source.choice(["", "!", made_up_text(seed, 5)])]
            parts += [source.choice(letters) for _ in range(source.randrange(1, 150))]
        text, piece = "".join(parts), source.randrange(1, 40)
        expected = whole(tokenizer, text)
        assert encode(tokenizer, text, piece=piece, overlap=13 if kind == "llama3" else overlap) == expected, text


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in UNCUT])
def test_a_line_without_spaces_is_really_cut(kind: str) -> None:
    tokenizer, source = tokenizer_of(kind), random.Random(0)
    for name, letters in LINES.items():
        told: list[int] = []
        line = "".join(source.choice(letters) for _ in range(6000))
        assert encode(tokenizer, line, progress=told.append, piece=300, overlap=64) == whole(tokenizer, line)
        assert (len(told) > 10) == (name not in UNCUT_LINES.get(kind, ())), name


def test_a_word_after_a_mark_ends_at_other_letters() -> None:
    """DeepSeek's rule: `!aaaé` is two words and `aaaé` one, so that the run may not be entered in its middle."""
    tokenizer = tokenizer_of("deepseek")
    for front in ("!", " ", "é!", "("):
        for end in ("é", "e\u0301", "漢", "б", "1", "'s", ""):
            text = front + "aabab" * 60 + end + "ba" * 60
            assert encode(tokenizer, text, piece=40, overlap=13) == whole(tokenizer, text), text


@pytest.mark.parametrize("kind", KINDS)
def test_control_text_decodes_to_what_was_written(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    for text in ("the <s> an", "<s>the</s>lo <s>", "an<|im_end|>\n<s> the<s><s>", " <s>", "the" + "<s> an " * 50):
        unknown = [c for c in set(text) if "<unk>" in tokenizer.decode(encode(tokenizer, "an" + c).ids)]
        expected = re.sub("\0+", "\0", "".join("\0" if c in unknown else c for c in text))
        for continues in (False, True):
            decoded = tokenizer.decode(encode(tokenizer, text, continues=continues, piece=20, overlap=13).ids)
            decoded = re.sub("\0+", "\0", decoded.replace("<unk>", "\0"))
            assert decoded.removeprefix(" ") == expected.removeprefix(" ")


@pytest.mark.parametrize("line", marked(["lower", "han", "upper", "mixed", "digits", "sign"], 2))
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in UNCUT])
def test_time_grows_in_line_with_a_line_without_spaces(kind: str, line: str) -> None:
    tokenizer, source = tokenizer_of(kind), random.Random(0)
    text = "".join(source.choice(LINES[line]) for _ in range(400_000))
    assert len(text) > 4 * PIECE
    # The tokenizer remembers its first 10,000 words: were they this text's, they would favour the shorter one.
    assert encode(tokenizer, text[::-1]) == whole(tokenizer, text[::-1])

    quarters = [text[begin : begin + 100_000] for begin in range(0, 400_000, 100_000)]

    def seconds(*texts: str) -> float:
        began = time.process_time()
        for part in texts:
            encode(tokenizer, part)
        return time.process_time() - began

    limit = 9 if line in UNCUT_LINES.get(kind, ()) else 4.5
    long, short = [], []
    for _ in range(12):  # the least of some, more where the machine has other work
        long.append(seconds(text))
        short.append(seconds(*quarters) / 4)
        if len(long) > 2 and min(long) <= limit * min(short):
            break
    assert min(long) <= limit * min(short)
