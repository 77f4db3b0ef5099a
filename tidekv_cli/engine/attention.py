"""Causal attention that also gives the log-sum-exp: what a layer may ask, and what backends share. Knows no model.

Queries are the newest tokens: query i of n sees keys 0 .. L-n+i (bottom-right alignment), or what its rule leaves of
them. No mask tensor as long as the prompt is made by the fast backends; grouped heads are never repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tidekv_cli.engine.masks import CAUSAL, Visible

# Queries at a time where a matrix of logits or a mask is needed.
_ROWS = 256
# (queries, keys, values, scale, causal) -> output and LSE; with causal as many queries as keys.
PartKernel = Callable[[Tensor, Tensor, Tensor, float, bool], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Rule:
    """What a layer asks of attention beside the causal softmax.

    `softcap` c bounds logits x to c tanh(x / c); `sinks` [Hq] are logits of one more key, which has no value.
    """

    visible: Visible = CAUSAL
    softcap: float | None = None
    sinks: Tensor | None = None


PLAIN = Rule()


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Logits as `Rule.softcap` bounds them; in place."""
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


class Attention(Protocol):
    """A backend."""

    @property
    def name(self) -> str:
        """What `--attention` calls it."""

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, scale: float, rule: Rule = PLAIN
    ) -> tuple[Tensor, Tensor]:
        """Output [B, Hq, n, Dv] in the queries' dtype and LSE [B, Hq, n] in float32 (natural log, scaled logits).

        queries [B, Hq, n, D]; keys [B, Hkv, L, D], values [B, Hkv, L, Dv] of the last L positions; Hq a multiple of
        Hkv; n <= L. The LSE is that of the logits that the rule leaves, sinks among them.
        """


def in_rows(queries: Tensor, keys: Tensor, values: Tensor, scale: float, rule: Rule) -> tuple[Tensor, Tensor]:
    """What no kernel does, some queries at a time, so that no matrix of logits has the whole chunk's rows."""
    past, window = keys.shape[2] - queries.shape[2], rule.visible.window
    parts = []
    for start, stop in rows_of(queries.shape[2]):
        first = 0 if window is None else max(past + start - window + 1, 0)
        own = slice(first, past + stop)
        parts.append(Eager().attend(queries[:, :, start:stop], keys[:, :, own], values[:, :, own], scale, rule))
    return torch.cat([out for out, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)


def rows_of(count: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of some rows at a time."""
    return ((start, min(start + _ROWS, count)) for start in range(0, count, _ROWS))


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output and LSE once the softmax has a share for `sinks` [Hq], which have no value."""
    if sinks is None:
        return out, lse
    total = torch.logaddexp(lse, sinks.to(lse.dtype)[None, :, None])
    return out * (lse - total).exp()[..., None].to(out.dtype), total


def by_parts(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, kernel: PartKernel, fold_below: int
) -> tuple[Tensor, Tensor]:
    """Causal attention with a kernel that is causal for as many queries as keys only.

    Past keys without a mask and the diagonal block, merged by LSE. Up to `fold_below` queries, a group's heads are
    folded into one head for the past, so that its keys are read once, not G times.
    """
    rows = queries.shape[2]
    past = keys.shape[2] - rows
    if rows == 1:
        return folded(queries, keys, values, scale, kernel)
    diagonal = kernel(queries, keys[:, :, past:], values[:, :, past:], scale, True)
    if past == 0:
        return diagonal
    before = queries, keys[:, :, :past], values[:, :, :past], scale
    return merge(diagonal, folded(*before, kernel) if rows <= fold_below else kernel(*before, False))


def folded(queries: Tensor, keys: Tensor, values: Tensor, scale: float, kernel: PartKernel) -> tuple[Tensor, Tensor]:
    """Every query sees every key; the heads of a group as more rows of one head: [B, Hkv, G n, D]."""
    batch, heads, rows, _ = queries.shape
    out, lse = kernel(queries.reshape(batch, keys.shape[1], -1, queries.shape[3]), keys, values, scale, False)
    return out.reshape(batch, heads, rows, -1), lse.reshape(batch, heads, rows)


def all_seen(
    attention: Attention, queries: Tensor, keys: Tensor, values: Tensor, scale: float, rule: Rule = PLAIN
) -> tuple[Tensor, Tensor]:
    """As `attend` of any backend, but every query sees every key: each is a head of its own, with one query."""
    batch, heads, rows, size = queries.shape
    out, lse = attention.attend(queries.reshape(batch, heads * rows, 1, size), keys, values, scale, rule)
    return out.reshape(batch, heads, rows, -1), lse.reshape(batch, heads, rows)


def merge(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint key sets, from the output and LSE over each. Sums in float32."""
    (out, lse), (other, other_lse) = first, second
    total = torch.logaddexp(lse, other_lse)
    dtype = out.dtype
    merged = out.float().mul_((lse - total).exp_()[..., None])
    merged.addcmul_(other.float(), (other_lse - total).exp_()[..., None])
    return merged.to(dtype), total


def few_keys(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float | None, first_position: int
) -> tuple[Tensor, Tensor]:
    """Output and LSE over `keys` [B, Hkv, L, D] at positions 0 .. L-1, so few that their logits may be a matrix.

    Query i of `queries` [B, Hq, n, D] is at first_position + i, and sees no key after it. Some queries at a time.
    """
    if queries.shape[2] > _ROWS:
        parts = [
            few_keys(queries[:, :, start:stop], keys, values, scale, softcap, first_position + start)
            for start, stop in rows_of(queries.shape[2])
        ]
        return torch.cat([out for out, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)
    rows, length = queries.shape[2], keys.shape[2]
    grouped = queries.float().unflatten(1, (keys.shape[1], -1))  # [B, Hkv, G, n, D]
    logits = capped(grouped @ keys.float().transpose(2, 3)[:, :, None] * scale, softcap)  # [B, Hkv, G, n, L]
    if first_position < length - 1:
        logits.masked_fill_(~CAUSAL.seen(first_position, rows, length, keys.device), float("-inf"))
    lse = logits.logsumexp(-1)
    out = (logits - lse[..., None]).exp() @ values.float()[:, :, None]
    return out.flatten(1, 2).to(queries.dtype), lse.flatten(1, 2)


class Eager:
    """Plain softmax attention in float32 with a full [n, L] logit matrix: slow, obvious, for every rule."""

    name = "eager"

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, scale: float, rule: Rule = PLAIN
    ) -> tuple[Tensor, Tensor]:
        """See `Attention.attend`."""
        batch, heads, rows, size = queries.shape
        length = keys.shape[2]
        grouped = queries.float().reshape(batch, keys.shape[1], -1, size)  # [B, Hkv, G n, D]
        logits = capped(grouped @ keys.float().transpose(2, 3) * scale, rule.softcap)  # [B, Hkv, G n, L]
        hidden = ~rule.visible.seen(length - rows, rows, length, keys.device)  # [n, L]
        logits.view(batch, keys.shape[1], -1, rows, length).masked_fill_(hidden, float("-inf"))
        lse = logits.logsumexp(-1)
        out = (logits - lse[..., None]).exp() @ values.float()
        out, lse = out.reshape(batch, heads, rows, -1), lse.reshape(batch, heads, rows)
        out, lse = with_sinks(out, lse, rule.sinks)
        return out.to(queries.dtype), lse


class Math:
    """As `Eager`, some queries at a time: no kernel is needed, and no matrix of logits has the whole chunk's rows."""

    name = "math"

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, scale: float, rule: Rule = PLAIN
    ) -> tuple[Tensor, Tensor]:
        """See `Attention.attend`."""
        return in_rows(queries, keys, values, scale, rule)
