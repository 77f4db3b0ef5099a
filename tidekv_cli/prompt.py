"""Documents and question -> token ids, through the model's chat template. Knows no model weights.

Control text inside a document or question stays text; the template's own control tokens are tokens.
"""

from __future__ import annotations

import inspect
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from tidekv_cli.documents import Document
from tidekv_cli.errors import UsageError, WindowError
from tidekv_cli.tokenization import PIECE, encode
from tidekv_cli.tokenizer_kind import kind_of

_SEPARATOR = "\n\n"
_PLACEHOLDER = "\ue000document\ue001"


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, of which `documents_start` .. `documents_stop`-1 come from documents and may be dropped."""

    token_ids: list[int]
    documents_start: int
    documents_stop: int
    document_tokens: tuple[int, ...]
    truncated_tokens: int = 0


def build_prompt(
    tokenizer: Any,
    documents: Sequence[Document],
    question: str | None = None,
    system: str | None = None,
    raw: bool = False,
    template_arguments: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
    piece: int = PIECE,
) -> Prompt:
    """The documents in order, then the question, as one user message (or, `raw`, as they are).

    `progress` is told the characters done and their number; `piece` is how many go through the tokenizer at once.
    Raises `UsageError` where the template refuses, for example a system message that it has no place for.
    """
    stripped = 0  # characters that the template takes away at the front
    body = _SEPARATOR.join([d.text for d in documents] + ([question] if question else []))
    if raw or not getattr(tokenizer, "chat_template", None):
        if system:
            raise UsageError("--system needs a chat template", "drop --raw, or put the text into the document")
        before = after = ""
        start_ids = list(tokenizer("", verbose=False)["input_ids"])  # the tokenizer's own BOS, if it has one
    else:
        before, after, trims = _template(tokenizer, system, template_arguments or {})
        start_ids = []
        if trims:
            stripped = len(body) - len(body.lstrip())
            body = body.strip()
    total = len(before) + len(body) + len(after)
    ids, starts = list(start_ids), [-1] * len(start_ids)
    for offset, text, control in _parts(tokenizer, before, body, after):

        def told(done: int, offset: int = offset) -> None:
            if progress is not None:
                progress(offset + done, total)

        encoded = encode(tokenizer, text, control, offset > 0, told, piece)
        ids += encoded.ids
        starts += [offset + begin for begin in encoded.starts]
    lengths = [len(document.text) + len(_SEPARATOR) for document in documents]
    borders = [min(max(end - stripped, 0), len(body)) + len(before) for end in accumulate(lengths)]
    return _with_spans(ids, starts, len(before), borders)


def _with_spans(ids: list[int], starts: list[int], base: int, borders: Sequence[int]) -> Prompt:
    """Count the tokens that begin inside each document: from `base`, or where the one before ends, to its border."""
    # A token's start never lies before that of the token before it.
    edges = [bisect_left(starts, place) for place in (base, *borders)]
    counts = tuple(stop - start for start, stop in pairwise(edges))
    return Prompt(ids, edges[0], edges[-1], counts)


def _template(tokenizer: Any, system: str | None, arguments: Mapping[str, Any]) -> tuple[str, str, bool]:
    """Text before and after the user's content, and whether the template strips white space around it."""
    reserved = inspect.signature(tokenizer.apply_chat_template).parameters.keys() & arguments.keys()
    if reserved:
        raise UsageError(f"--template-arg {min(reserved)} is not for the template", "give a variable that it uses")
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": f" {_PLACEHOLDER} "})
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **arguments)
    except Exception as error:  # a template raises whatever its author chose
        raise UsageError(
            f"the model's chat template refuses: {error}", "drop --system or --template-arg, or use --raw"
        ) from error
    padded = f" {_PLACEHOLDER} "
    marker = padded if padded in text else _PLACEHOLDER
    before, found, after = text.partition(marker)
    if not found or marker in after:
        raise UsageError("the model's chat template does not carry the user's text as it is", "use --raw")
    return before, after, marker is _PLACEHOLDER


def _parts(tokenizer: Any, before: str, body: str, after: str) -> list[tuple[int, str, bool]]:
    """(offset, text, whether control tokens are recognised): the template's first and last control tokens apart."""
    if not before and not after:
        return [(0, body, False)]
    special = [token for token in tokenizer.added_tokens_decoder.values() if token.special]
    control = [str(token) for token in special]
    if not any(token in body for token in control) and (
        kind_of(tokenizer, before + body + after) is None or any(t.lstrip or t.rstrip or t.single_word for t in special)
    ):
        return [(0, before + body + after, True)]
    # The plain text around the body is encoded with it, so that no token border is forced where there is none.
    head = max((before.rfind(token) + len(token) for token in control if token in before), default=0)
    found = [after.find(token) for token in control if token in after]
    tail = min(found, default=len(after))
    parts = (
        (0, before[:head], True),
        (head, before[head:] + body + after[:tail], False),
        (len(before) + len(body) + tail, after[tail:], True),
    )
    return [part for part in parts if part[1]]


def unknown_arguments(tokenizer: Any, arguments: Mapping[str, Any]) -> list[str]:
    """Names that the chat template never mentions, so that setting them changes nothing."""
    template = getattr(tokenizer, "chat_template", None) or ""
    source = "\n".join(template.values()) if isinstance(template, Mapping) else str(template)
    return [name for name in arguments if not re.search(rf"\b{re.escape(name)}\b", source)]


def truncate(prompt: Prompt, limit: int, where: str) -> Prompt:
    """Drop document tokens so that at most `limit` ids remain: from the `head`, `tail` or `middle` of the documents.

    Raises `WindowError` if the rest of the prompt alone is longer than that.
    """
    excess = len(prompt.token_ids) - limit
    available = prompt.documents_stop - prompt.documents_start
    if excess <= 0:
        return prompt
    if excess >= available:
        raise WindowError(
            f"the prompt has {len(prompt.token_ids) - available} tokens besides its documents, {limit} is the limit",
            "shorten the question or generate fewer tokens",
        )
    keep = available - excess
    before = {"head": 0, "tail": keep, "middle": -(-keep // 2)}[where]
    first = prompt.documents_start + before
    ids = prompt.token_ids[:first] + prompt.token_ids[first + excess :]
    return Prompt(ids, prompt.documents_start, prompt.documents_stop - excess, prompt.document_tokens, excess)
