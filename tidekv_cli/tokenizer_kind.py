"""What a tokenizer does to text, as far as that tells where text may be cut. Knows no text but to look for tokens.

A tokenizer of which nothing is known here is not cut at all.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import models

from tidekv_cli.word_rules import WordRules, word_rules

_SPACE = "▁"


@dataclass(frozen=True, slots=True)
class Kind:
    """Where a tokenizer may be cut: as `words` say, else (None) at any token.

    `added` are the tokens that it looks for before it does anything else.
    """

    words: WordRules | None
    added: frozenset[str]

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
    words = word_rules(pre_steps)
    if words is not None:
        return Kind(words, added) if steps in ([], [{"type": "NFC"}]) else None
    if model.ignore_merges or not _keeps_whole(steps, pre_steps):
        return None
    prepends = any(step["type"] == "Prepend" or step.get("prepend_scheme") == "always" for step in steps + pre_steps)
    if prepends and any(token.content in text for token in plain):  # the text after each would get its own space
        return None
    return Kind(None, added)


def without_prefix(component: Any, first_only: bool = False) -> Any:
    """A normalizer or pre-tokenizer for text that is not at the front: without the space that is put there.

    `first_only` leaves the space to a tokenizer that puts one after each control token.
    """
    state = _state(component)
    changed = _prefixless(state, first_only)
    if changed == state:
        return component
    if changed is None:
        return None
    after = copy.copy(component)
    after.__setstate__(json.dumps(changed).encode())
    return after


def _prefixless(state: dict[str, Any], first_only: bool) -> dict[str, Any] | None:
    match state:
        case {"type": "Sequence"}:
            key = "normalizers" if "normalizers" in state else "pretokenizers"
            parts = [_prefixless(part, first_only) for part in state[key]]
            return state | {key: [part for part in parts if part is not None]}
        case {"type": "Prepend"}:
            return state if first_only else None
        case {"type": "Metaspace", "prepend_scheme": scheme} if not first_only or scheme == "first":
            return state | {"prepend_scheme": "never"}
        case {"type": "ByteLevel", "add_prefix_space": True} if not first_only:
            return state | {"add_prefix_space": False}
    return state


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
