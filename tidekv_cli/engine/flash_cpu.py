"""torch's flash kernel for the CPU, which gives the log-sum-exp. Knows no model, no cache and no selector."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tidekv_cli.engine.attention import PLAIN, Rule, by_parts, folded, in_rows, rows_of, with_sinks
from tidekv_cli.engine.masks import Visible

_FOLD_BELOW = 512


class FlashCPU:
    """Past keys without a mask, the diagonal block causal, merged by LSE; windows with a mask over the keys in them."""

    name = "sdpa"

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, scale: float, rule: Rule = PLAIN
    ) -> tuple[Tensor, Tensor]:
        """See `Attention.attend`."""
        if rule.softcap is not None or rule.visible.function is not None:
            return in_rows(queries, keys, values, scale, rule)
        width, size = values.shape[3], keys.shape[3]
        if width < size:  # the kernel wants them alike
            values = F.pad(values, (0, size - width))
        window = rule.visible.window
        if window is None or window >= keys.shape[2]:
            out, lse = by_parts(queries, keys, values, scale, _flash, _FOLD_BELOW)
        elif queries.shape[2] == 1:
            out, lse = folded(queries, keys[:, :, -window:], values[:, :, -window:], scale, _flash)
        else:
            out, lse = _windowed(queries, keys, values, scale, window)
        return with_sinks(out if width == size else out[..., :width], lse, rule.sinks)


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
    for start, stop in rows_of(queries.shape[2]):
        first, last = max(past + start - window + 1, 0), past + stop
        seen = Visible(window).seen(past + start - first, stop - start, last - first, queries.device)
        mask = torch.zeros(seen.shape, dtype=queries.dtype, device=queries.device).masked_fill_(~seen, float("-inf"))
        rows = queries[:, :, start:stop]
        parts.append(_flash(rows, keys[:, :, first:last], values[:, :, first:last], scale, mask=mask))
    return torch.cat([out for out, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)
