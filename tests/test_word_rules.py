"""Rules for words: which are known, and what is not enough to keep words apart."""

from __future__ import annotations

from typing import Any

import pytest

from tidekv_cli.word_rules import word_rules

BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
BYTES_AND_WORDS = BYTES | {"use_regex": True}
DIGITS = {"type": "Digits", "individual_digits": True}
LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
MARKED = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
CASED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
CAPITALS = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CJK = "[一-龥぀-ゟ゠-ヿ]+"


def split(pattern: str, **changes: Any) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False} | changes


@pytest.mark.parametrize(
    "steps",
    [
        [],
        [BYTES],
        [DIGITS, BYTES],
        [split(r"\p{N}{1,3}"), BYTES],
        [split(r"\p{N}{1,3}"), split(CJK), BYTES],
        [split(REST), BYTES],
        [BYTES, split(f"{LETTERS}|{REST}")],  # a space's byte is a letter there
        [BYTES, BYTES_AND_WORDS],
        [split(f"{LETTERS}|{REST}")],
        [split(f"{CASED}|{REST}"), BYTES],  # capitals alone are in no word
        [split(f"{LETTERS}|{MARKED}|{REST}"), BYTES],  # what precedes a word decides where it ends
        [split(f"{LETTERS}|{CJK}|{REST}"), BYTES],
        [split(f"{LETTERS}|{REST}| ?[^\\s\\p{{L}}\\p{{N}}]+"), BYTES],
        [split(rf"{LETTERS}|\S+"), BYTES],
        [split(rf"(?<=x){LETTERS}"), BYTES],
        [split(f"{LETTERS}|{REST}", behavior="Removed"), BYTES],
        [split(f"{LETTERS}|{REST}", invert=True), BYTES],
        [{"type": "Whitespace"}, BYTES_AND_WORDS],
        [BYTES_AND_WORDS | {"add_prefix_space": True}],
    ],
)
def test_what_does_not_surely_keep_words_apart_is_not_known(steps: list[dict[str, Any]]) -> None:
    assert word_rules(steps) is None


@pytest.mark.parametrize(
    ("steps", "in_one_word", "not_in_one"),
    [
        ([BYTES_AND_WORDS], "aB漢", "a1"),
        ([DIGITS, BYTES_AND_WORDS], "한é", "a="),
        ([split(rf"{LETTERS}|\p{{N}}|{REST}"), BYTES], "漢a", "a "),
        ([split(rf"{MARKED}|\p{{N}}|{REST}"), BYTES], "漢a", "a "),
        ([split(CJK), BYTES_AND_WORDS], "漢か", "漢a"),
        ([split(f"{CASED}|{CAPITALS}|{REST}"), BYTES], "ab", "aB"),
    ],
)
def test_runs_that_lie_in_one_word(steps: list[dict[str, Any]], in_one_word: str, not_in_one: str) -> None:
    rules = word_rules(steps)
    assert rules is not None
    assert rules.run.fullmatch(in_one_word * 20)
    assert not rules.run.fullmatch(not_in_one * 20)
    assert rules.end.match("a ") and not rules.end.match("a's") and not rules.end.match("ab")


def test_digits_are_one_word_unless_a_rule_counts_them() -> None:
    whole, single = word_rules([BYTES_AND_WORDS]), word_rules([DIGITS, BYTES_AND_WORDS])
    assert whole is not None and not whole.digits_apart
    assert single is not None and single.digits_apart
