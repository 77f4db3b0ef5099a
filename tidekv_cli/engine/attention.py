"""Causal attention that also gives the log-sum-exp, per backend. Knows no model, no cache and no selector.

Queries are the newest tokens: query i of n sees keys 0 .. L-n+i (bottom-right alignment). No mask tensor is made
by the fast backends; grouped heads are never repeated.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from tidekv_cli.errors import UsageError

# Up to this many queries, folding a group's heads into one head reads the past keys once, not G times.
_FOLD_BELOW = 512


class Attention(Protocol):
    """A backend. `name` is what `--attention` calls it."""

    name: str

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Output [B, Hq, n, D] in the queries' dtype and LSE [B, Hq, n] in float32 (natural log, scaled logits).

        queries [B, Hq, n, D]; keys, values [B, Hkv, L, D]; Hq a multiple of Hkv; n <= L.
        """


class FlashCPU:
    """torch's flash kernel for the CPU: past keys without a mask, the diagonal block causal, merged by LSE."""

    name = "sdpa"

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """See `Attention.attend`."""
        past = keys.shape[2] - queries.shape[2]
        if queries.shape[2] == 1:
            return _folded(queries, keys, values, scale)
        diagonal = _flash(queries, keys[:, :, past:], values[:, :, past:], scale, causal=True)
        if past == 0:
            return diagonal
        attend = _folded if queries.shape[2] <= _FOLD_BELOW else _flash
        return merge(diagonal, attend(queries, keys[:, :, :past], values[:, :, :past], scale))


def _flash(queries: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool = False) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        queries, keys, values, 0.0, causal, scale=scale
    )
    return out, lse


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
    """Plain softmax attention in float32 with a full [n, L] logit matrix: slow, obvious, the tests' twin."""

    name = "eager"

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """See `Attention.attend`."""
        batch, heads, rows, size = queries.shape
        folded = queries.float().reshape(batch, keys.shape[1], -1, size)  # [B, Hkv, G n, D]
        logits = folded @ keys.float().transpose(2, 3) * scale  # [B, Hkv, G n, L]
        length = keys.shape[2]
        positions = torch.arange(length, device=keys.device)
        hidden = positions[None, :] > positions[length - rows :, None]  # [n, L]
        logits.view(batch, keys.shape[1], -1, rows, length).masked_fill_(hidden, float("-inf"))
        lse = logits.logsumexp(-1)
        out = (logits - lse[..., None]).exp() @ values.float()
        return out.reshape(batch, heads, rows, -1).to(queries.dtype), lse.reshape(batch, heads, rows)


def choose_attention(name: str, device: torch.device) -> Attention:
    """The backend that `--attention NAME` means on `device`. Raises `UsageError` where it does not exist there."""
    if name == "eager":
        return Eager()
    if name == "sdpa" and device.type == "cpu":
        return FlashCPU()
    raise UsageError(
        f"--attention {name} is not available on device {device.type}", "use --attention auto, sdpa or eager"
    )
