"""Causal attention that also gives the log-sum-exp, per backend. Knows no model, no cache and no selector.

Queries are the newest tokens: query i of n sees keys 0 .. L-n+i (bottom-right alignment), or what its rule leaves of
them. No mask tensor as long as the prompt is made by the fast backends; grouped heads are never repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tidekv_cli.engine.masks import CAUSAL, Visible
from tidekv_cli.errors import UsageError

# Up to this many queries, folding a group's heads into one head reads the past keys once, not G times.
_FOLD_BELOW = 512
# Queries at a time where a mask is needed.
_ROWS = 256


@dataclass(frozen=True, slots=True)
class Rule:
    """What a layer asks of attention beside the causal softmax.

    `softcap` c bounds logits x to c tanh(x / c); `sinks` [Hq] are logits of one more key, which has no value.
    """

    visible: Visible = CAUSAL
    softcap: float | None = None
    sinks: Tensor | None = None


PLAIN = Rule()


class Attention(Protocol):
    """A backend. `name` is what `--attention` calls it."""

    name: str

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, scale: float, rule: Rule = PLAIN
    ) -> tuple[Tensor, Tensor]:
        """Output [B, Hq, n, Dv] in the queries' dtype and LSE [B, Hq, n] in float32 (natural log, scaled logits).

        queries [B, Hq, n, D]; keys [B, Hkv, L, D], values [B, Hkv, L, Dv] of the last L positions; Hq a multiple of
        Hkv; n <= L. The LSE is that of the logits that the rule leaves, sinks among them.
        """


class FlashCPU:
    """torch's flash kernel for the CPU: past keys without a mask, the diagonal block causal, merged by LSE."""

    name = "sdpa"

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, scale: float, rule: Rule = PLAIN
    ) -> tuple[Tensor, Tensor]:
        """See `Attention.attend`."""
        if rule.softcap is not None or rule.visible.function is not None:
            return _in_rows(queries, keys, values, scale, rule)
        width, size = values.shape[3], keys.shape[3]
        if width < size:  # the kernel wants them alike
            values = F.pad(values, (0, size - width))
        window = rule.visible.window
        if window is None or window >= keys.shape[2]:
            out, lse = self._causal(queries, keys, values, scale)
        elif queries.shape[2] == 1:
            out, lse = _folded(queries, keys[:, :, -window:], values[:, :, -window:], scale)
        else:
            out, lse = _windowed(queries, keys, values, scale, window)
        return with_sinks(out if width == size else out[..., :width], lse, rule.sinks)

    def _causal(self, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        past = keys.shape[2] - queries.shape[2]
        if queries.shape[2] == 1:
            return _folded(queries, keys, values, scale)
        diagonal = _flash(queries, keys[:, :, past:], values[:, :, past:], scale, causal=True)
        if past == 0:
            return diagonal
        attend = _folded if queries.shape[2] <= _FOLD_BELOW else _flash
        return merge(diagonal, attend(queries, keys[:, :, :past], values[:, :, :past], scale))


def _takes_grouped_heads() -> bool:
    """Whether the kernel maps a group of query heads to its own keys.

    Older ones, as in torch 2.5, read as many key heads as there are query heads, here the second, and elsewhere past
    the end.
    """
    pair = torch.arange(16.0).reshape(1, 2, 1, 8)
    queries, first = torch.ones_like(pair), pair[:, :1]
    out, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(queries, first, first)
    return torch.equal(out[:, 1:], first)


_GROUPED_HEADS = _takes_grouped_heads()


def _flash(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    shape = queries.shape
    if shape[1] != keys.shape[1] and not _GROUPED_HEADS:
        # Groups as a batch, each with its keys seen once a head: a stride of 0, not a copy.
        queries = queries.reshape(shape[0] * keys.shape[1], -1, *shape[2:])
        keys, values = (rows.flatten(0, 1)[:, None].expand(-1, queries.shape[1], -1, -1) for rows in (keys, values))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        queries, keys, values, 0.0, causal, attn_mask=mask, scale=scale
    )
    return out.reshape(*shape[:3], -1), lse.reshape(shape[:3])


def _windowed(queries: Tensor, keys: Tensor, values: Tensor, scale: float, window: int) -> tuple[Tensor, Tensor]:
    """Each query sees the last `window` keys up to its own: some queries at a time, over the keys that these see."""
    past = keys.shape[2] - queries.shape[2]
    parts = []
    for start, stop in _rows(queries.shape[2]):
        first, last = max(past + start - window + 1, 0), past + stop
        seen = Visible(window).seen(past + start - first, stop - start, last - first, queries.device)
        mask = torch.zeros(seen.shape, dtype=queries.dtype, device=queries.device).masked_fill_(~seen, float("-inf"))
        rows = queries[:, :, start:stop]
        parts.append(_flash(rows, keys[:, :, first:last], values[:, :, first:last], scale, mask=mask))
    return torch.cat([out for out, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)


def _in_rows(queries: Tensor, keys: Tensor, values: Tensor, scale: float, rule: Rule) -> tuple[Tensor, Tensor]:
    """What no kernel does, some queries at a time, so that no matrix of logits has the whole chunk's rows."""
    past, window = keys.shape[2] - queries.shape[2], rule.visible.window
    parts = []
    for start, stop in _rows(queries.shape[2]):
        first = 0 if window is None else max(past + start - window + 1, 0)
        own = slice(first, past + stop)
        parts.append(Eager().attend(queries[:, :, start:stop], keys[:, :, own], values[:, :, own], scale, rule))
    return torch.cat([out for out, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)


def _rows(count: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + _ROWS, count)) for start in range(0, count, _ROWS))


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output and LSE once the softmax has a share for `sinks` [Hq], which have no value."""
    if sinks is None:
        return out, lse
    total = torch.logaddexp(lse, sinks.to(lse.dtype)[None, :, None])
    return out * (lse - total).exp()[..., None].to(out.dtype), total


def _folded(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The heads of a group as more rows of one head: [B, Hkv, G n, D]."""
    batch, heads, rows, _ = queries.shape
    out, lse = _flash(queries.reshape(batch, keys.shape[1], -1, queries.shape[3]), keys, values, scale)
    return out.reshape(batch, heads, rows, -1), lse.reshape(batch, heads, rows)


def merge(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint key sets, from the output and LSE over each. Sums in float32."""
    (out, lse), (other, other_lse) = first, second
    total = torch.logaddexp(lse, other_lse)
    dtype = out.dtype
    merged = out.float().mul_((lse - total).exp_()[..., None])
    merged.addcmul_(other.float(), (other_lse - total).exp_()[..., None])
    return merged.to(dtype), total


class Eager:
    """Plain softmax attention in float32 with a full [n, L] logit matrix: slow, obvious, for every rule."""

    name = "eager"

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, scale: float, rule: Rule = PLAIN
    ) -> tuple[Tensor, Tensor]:
        """See `Attention.attend`."""
        batch, heads, rows, size = queries.shape
        length = keys.shape[2]
        folded = queries.float().reshape(batch, keys.shape[1], -1, size)  # [B, Hkv, G n, D]
        logits = folded @ keys.float().transpose(2, 3) * scale  # [B, Hkv, G n, L]
        if rule.softcap is not None:
            logits = logits.div_(rule.softcap).tanh_().mul_(rule.softcap)
        hidden = ~rule.visible.seen(length - rows, rows, length, keys.device)  # [n, L]
        logits.view(batch, keys.shape[1], -1, rows, length).masked_fill_(hidden, float("-inf"))
        lse = logits.logsumexp(-1)
        out = (logits - lse[..., None]).exp() @ values.float()
        out, lse = out.reshape(batch, heads, rows, -1), lse.reshape(batch, heads, rows)
        out, lse = with_sinks(out, lse, rule.sinks)
        return out.to(queries.dtype), lse


def choose_attention(name: str, device: torch.device) -> Attention:
    """The backend that `--attention NAME` means on `device`. Raises `UsageError` where it does not exist there."""
    if name == "eager":
        return Eager()
    if name == "sdpa" and device.type == "cpu":
        return FlashCPU()
    raise UsageError(
        f"--attention {name} is not available on device {device.type}", "use --attention auto, sdpa or eager"
    )
