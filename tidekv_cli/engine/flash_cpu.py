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


def _flash(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        queries, keys, values, 0.0, causal, attn_mask=mask, scale=scale
    )
    return out, lse


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
