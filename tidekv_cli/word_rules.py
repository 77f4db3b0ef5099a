"""The rules by which tokenizers split text into words, and what they say about cutting it. Knows no vocabulary.

None of the rules here looks back, and none takes a letter and then a space, digit or punctuation mark other than an
apostrophe. A rule with anything else in it is not known.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_SIGN = r"!-/:-@\[-`{-~"
_CJK = "ぁ-ゖァ-ヺ一-龥"
# Letters that every rule takes for letters, and that no normal form changes, in groups that no rule divides.
_GROUPS = ("a-z", "A-Z", "ß-öø-ÿα-ωа-я", "À-ÖØ-ÞΑ-ΡΣ-ΩА-Я", _CJK, "龦-鿿가-힣")
_LETTER = f"A-Za-zÀ-ÖØ-öø-ʯΑ-ΡΣ-ωА-я{_CJK}龦-鿿가-힣"
_WORD_END = rf"[{_LETTER}](?=[\s!-&(-@\[-`{{-~、。，！？])"
_DIGITS_END = rf"[0-9](?=[\s{_SIGN}])"
_CASE_CHANGE = "(?<!')[a-z](?=[A-Z])"  # after an apostrophe both letters may be its own
_OTHER_RUNS = ("[0-9]+", rf"[{_SIGN}]+", " +")

_SUFFIXES = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", "'s", "'t", "'re", "'ve", "'m", "'ll", "'d")
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_PLAIN = (rf"{_BEFORE}\p{{L}}+", r" ?\p{L}+")
_MARKED = (rf"{_BEFORE}[\p{{L}}\p{{M}}]+",)
_UPPER, _NOT_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = tuple(
    tuple(f"{_BEFORE}{_UPPER}{a}{_NOT_UPPER}{b}{end}" for a, b in ("*+", "+*"))
    for end in ("", *(f"{suffix}?" for suffix in _SUFFIXES[:1]))
)
# DeepSeek's: what follows a mark is a word of ASCII letters only.
_AFTER_MARK = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
)
_CJK_ALONE = ("[一-龥぀-ゟ゠-ヿ]+",)
_LETTERS = {*_PLAIN, *_MARKED, *_CASED[0], *_CASED[1], *_AFTER_MARK, *_CJK_ALONE}
_DIGITS_APART = {r"\p{N}", r"\p{N}{1,3}"}
_DIGITS = {*_DIGITS_APART, r"\p{N}+", r" ?\p{N}+"}
_SIGNS = {
    *(r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"),
    *(r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", r" ?[\p{P}\p{S}]+[\r\n]*"),
}
_SPACES = {r"\s*[\r\n]+", r"\s*[\r\n]", r"\s+(?!\S)", r"\s+"}
_PART = "|".join(
    re.escape(part) for part in sorted({*_SUFFIXES, *_LETTERS, *_DIGITS, *_SIGNS, *_SPACES}, key=len, reverse=True)
)
_RULE = re.compile(rf"(?:{_PART})(?:\|(?:{_PART}))*")
_NEXT_PART = re.compile(rf"({_PART})(?:\||\Z)")
_BYTE_LEVEL = (*_SUFFIXES[1:], r" ?\p{L}+", r" ?\p{N}+", r" ?[^\s\p{L}\p{N}]+", r"\s+(?!\S)", r"\s+")


@dataclass(frozen=True, slots=True)
class WordRules:
    """What pre-tokenizers do to words of more than three characters.

    `end` finds the last character of a word. A text that `run` matches lies in one word, but for its first three
    characters, and the rest of such a run from anywhere inside ends as the word does. Two exceptions: where
    `digits_apart`, a run of digits is several words, their borders sure; where `ascii_apart`, a run of ASCII letters
    does so only if no other letter follows it.
    """

    end: re.Pattern[str]
    run: re.Pattern[str]
    digits_apart: bool
    ascii_apart: bool


def word_rules(steps: Sequence[Mapping[str, Any]]) -> WordRules | None:
    """The rules of a byte-level pre-tokenizer, given its steps; None unless all are known and one isolates letters.

    The bytes' characters come last: a space's is a letter to the rules of a step behind.
    """
    if not steps or steps[-1].get("type") != "ByteLevel":
        return None
    rules = [_parts(step, last=step is steps[-1]) for step in steps]
    known = [rule for rule in rules if rule is not None and len(_SIGNS.intersection(rule)) < 2]
    kinds = [_letters(rule) for rule in known]
    if len(known) < len(steps) or "unknown" in kinds or not {"plain", "cased", "after mark"} & set(kinds):
        return None
    digits = {part for rule in known for part in rule} & _DIGITS
    ends = [_WORD_END] + [_DIGITS_END] * bool(digits) + [_CASE_CHANGE] * ("cased" in kinds)
    if set(kinds) <= {"plain", "none"}:
        letters = [f"[{_LETTER}]+"]
    else:
        letters = [f"[{group}]+" for group in _GROUPS] + ["[A-Za-z]+"] * ("cased" not in kinds)
    return WordRules(
        re.compile("|".join(ends)),
        re.compile("|".join([*letters, *_OTHER_RUNS])),
        not _DIGITS_APART.isdisjoint(digits),
        "after mark" in kinds,
    )


def _parts(step: Mapping[str, Any], last: bool) -> tuple[str, ...] | None:
    """The alternatives of a step that only splits, in their order; None if it is not known."""
    match step:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": bool(splits)} if last:
            return _BYTE_LEVEL if splits else ()
        case {"type": "Digits", "individual_digits": bool(each)}:
            return (r"\p{N}" if each else r"\p{N}+",)
        case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False}:
            return tuple(_NEXT_PART.findall(pattern)) if _RULE.fullmatch(pattern) else None
    return None


def _letters(rule: Sequence[str]) -> str:
    """What a rule does with letters. All of them must be taken by parts that end words at the same place."""
    parts = _LETTERS.intersection(rule)
    if not parts:
        return "none"
    if parts <= set(_PLAIN) or parts == set(_MARKED):
        return "plain"
    if any(parts == set(pair) for pair in _CASED):
        return "cased"
    if parts == set(_AFTER_MARK):
        return "after mark"
    return "cjk alone" if tuple(rule) == _CJK_ALONE else "unknown"
