"""What a tokenizer does to text, as far as that tells where text may be cut. Knows no text but to look for tokens.

A tokenizer of which nothing is known here is not cut at all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import models, normalizers, pre_tokenizers

# Letters, and what ends a word after them by every rule below. An apostrophe does not.
_LETTER = "A-Za-zÀ-ÖØ-öø-ʯΑ-ΡΣ-ωА-яぁ-ゖァ-ヺ一-鿿가-힣"
WORD_END = re.compile(rf"[{_LETTER}](?=[\s!-&(-@\[-`{{-~、。，！？])")
LOWER = re.compile("[a-z]+")  # a run of these lies in one word, but for what an apostrophe takes of its beginning

_SPACE = "▁"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _NOT_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# Of these the rules of published models consist. None takes a letter and then a space, digit or punctuation mark other
# than an apostrophe; none looks back.
_PARTS = (
    *(_SUFFIX, "'s", "'t", "'re", "'ve", "'m", "'ll", "'d"),
    *(rf"{_BEFORE}\p{{L}}+", rf"{_BEFORE}[\p{{L}}\p{{M}}]+", r" ?\p{L}+"),
    *(rf"{_BEFORE}{_UPPER}{a}{_NOT_UPPER}{b}{end}" for a, b in ("*+", "+*") for end in ("", f"{_SUFFIX}?")),
    *(r"\p{N}", r"\p{N}+", r"\p{N}{1,3}", r" ?\p{N}+"),
    *(r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"),
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
    *(r"\s*[\r\n]+", r"\s*[\r\n]", r"\s+(?!\S)", r"\s+"),
)
# DeepSeek's: the same holds, but a letter's word may end earlier when a mark comes before it.
_MORE_PARTS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
    r" ?[\p{P}\p{S}]+[\r\n]*",
    "[一-龥぀-ゟ゠-ヿ]+",
)


def _rule_of(parts: tuple[str, ...]) -> re.Pattern[str]:
    part = "|".join(re.escape(text) for text in sorted(parts, key=len, reverse=True))
    return re.compile(rf"(?:{part})(?:\|(?:{part}))*")


_RULE, _WIDER_RULE = _rule_of(_PARTS), _rule_of(_PARTS + _MORE_PARTS)


@dataclass(frozen=True, slots=True)
class Kind:
    """Where a tokenizer may be cut: `at_words` at ends of words, else at any token; `in_runs` also inside a word.

    `added` are the tokens that it looks for before it does anything else.
    """

    at_words: bool
    in_runs: bool
    added: frozenset[str]
    normalizer: Any
    pre_tokenizer: Any

    @property
    def longest_added(self) -> int:
        """Characters of the longest added token."""
        return max(map(len, self.added), default=0)

    def inside_added(self, text: str, place: int) -> bool:
        """Whether an added token begins before `place` and ends after it."""
        return any(
            len(token) > 1 and token in text[max(place - len(token) + 1, 0) : place + len(token) - 1]
            for token in self.added
        )

    def later_normalizer(self) -> Any:
        """The normalizer for text that is not at the front: without the space that is put there."""
        if self.at_words or self.normalizer is None:
            return self.normalizer
        return normalizers.Replace(" ", _SPACE)

    def later_pre_tokenizer(self, first_only: bool = False) -> Any:
        """Likewise; `first_only` leaves the space to a tokenizer that puts one after each control token."""
        state = _state(self.pre_tokenizer)
        if state.get("type") != "Metaspace" or (first_only and state["prepend_scheme"] != "first"):
            return self.pre_tokenizer
        return pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="never", split=False)


def kind_of(tokenizer: Any, text: str) -> Kind | None:
    """How `tokenizer` may be cut on `text`; None where nothing is sure."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not isinstance(backend.model, models.BPE):
        return None
    model, tokens = backend.model, backend.get_added_tokens_decoder().values()
    if model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    plain = [token for token in tokens if not token.special]
    if any((t.lstrip or t.rstrip or t.single_word or t.normalized) and t.content in text for t in plain):
        return None
    pre_steps = list(_steps(_state(backend.pre_tokenizer), "pretokenizers"))
    steps = list(_steps(_state(backend.normalizer), "normalizers"))
    added = frozenset(token.content for token in tokens)
    if pre_steps and all(_splits_words(step, _WIDER_RULE) for step in pre_steps):
        if steps not in ([], [{"type": "NFC"}]) or not any(step["type"] == "ByteLevel" for step in pre_steps):
            return None
        in_runs = all(_splits_words(step, _RULE) for step in pre_steps)
        return Kind(True, in_runs, added, backend.normalizer, backend.pre_tokenizer)
    if model.ignore_merges or not _keeps_whole(steps, pre_steps):
        return None
    prepends = any(step["type"] == "Prepend" or step.get("prepend_scheme") == "always" for step in steps + pre_steps)
    if prepends and any(token.content in text for token in plain):  # the text after each would get its own space
        return None
    return Kind(False, False, added, backend.normalizer, backend.pre_tokenizer)


def _splits_words(step: Mapping[str, Any], rule: re.Pattern[str]) -> bool:
    """Whether a pre-tokenizer's step only splits, by a rule that is known."""
    match step:
        case {"type": "ByteLevel", "add_prefix_space": False} | {"type": "Digits"}:
            return True
        case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}:
            return rule.fullmatch(pattern) is not None
    return False


def _keeps_whole(steps: list[dict[str, Any]], pre_steps: list[dict[str, Any]]) -> bool:
    """Whether all text between added tokens is one word, its spaces replaced and perhaps one put before it."""
    replaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    if any(step != replaces and step != {"type": "Prepend", "prepend": _SPACE} for step in steps):
        return False
    match pre_steps:
        case []:
            return True
        case [{"type": "Metaspace", "replacement": "▁", "split": False}]:
            return not steps
        case [{"type": "Split", "pattern": {"String": " "}}]:
            return replaces in steps
    return False


def _state(component: Any) -> dict[str, Any]:
    return {} if component is None else dict(json.loads(component.__getstate__()))


def _steps(state: Mapping[str, Any], key: str) -> Iterator[dict[str, Any]]:
    """The steps of a component that is one or a sequence of them, however nested."""
    if state.get("type") == "Sequence":
        for part in state[key]:
            yield from _steps(part, key)
    elif state:
        yield dict(state)
