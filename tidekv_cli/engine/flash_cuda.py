"""Fused attention kernels on CUDA devices that give the log-sum-exp. Knows no model, no cache and no selector.

What a kernel does not do by itself (soft-caps, odd head sizes, masks of other kinds) is done in rows without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tidekv_cli.engine.attention import PLAIN, PartKernel, Rule, by_parts, in_rows, with_sinks
from tidekv_cli.engine.kernel_limits import HEAD_DIM_STEP, MOST_HEAD_DIM

_LSE_ROWS = 32  # the efficient kernel rounds the rows of its log-sum-exp up to it


class FlashKernel(Protocol):
    """Causal with bottom-right alignment, for grouped heads, of one head size for all three."""

    def __call__(
        self, queries: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        """Output [B, Hq, n, D] and LSE [B, Hq, n] in float32, of the last `window` keys up to each query's own."""


@dataclass(frozen=True, slots=True)
class Flash:
    """A flash kernel: windows and groups by itself, soft-caps if it `caps`."""

    name: str
    kernel: FlashKernel
    caps: bool

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, scale: float, rule: Rule = PLAIN
    ) -> tuple[Tensor, Tensor]:
        """See `Attention.attend`."""
        size, width, window = keys.shape[3], values.shape[3], rule.visible.window
        unfit = size > MOST_HEAD_DIM or size % HEAD_DIM_STEP or width > size
        if unfit or rule.visible.function is not None or (rule.softcap is not None and not self.caps):
            return in_rows(queries, keys, values, scale, rule)
        if width < size:
            values = F.pad(values, (0, size - width))
        if window is not None and window >= keys.shape[2]:
            window = None
        out, lse = self.kernel(queries, keys, values, scale, window, rule.softcap)
        return with_sinks(out[..., :width], lse, rule.sinks)


def package_kernel(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """The package flash-attn, from 2.6 on. See `FlashKernel`."""
    from flash_attn import flash_attn_func

    out, lse, _ = flash_attn_func(
        *(tensor.transpose(1, 2) for tensor in (queries, keys, values)),
        softmax_scale=scale,
        causal=True,
        window_size=(-1, -1) if window is None else (window - 1, 0),
        softcap=softcap or 0.0,
        return_attn_probs=True,
    )
    return out.transpose(1, 2), lse.reshape(queries.shape[:3])


def torch_kernel(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """What `aten::_scaled_dot_product_flash_attention` calls, with a window. See `FlashKernel`; `softcap` is None."""
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *(tensor.transpose(1, 2) for tensor in (queries, keys, values)),
        cum_seq_q=None,
        cum_seq_k=None,
        max_q=queries.shape[2],
        max_k=keys.shape[2],
        dropout_p=0.0,
        is_causal=True,
        return_debug_mask=False,
        scale=scale,
        window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
    )
    return out.transpose(1, 2), lse.reshape(queries.shape[:3])


@dataclass(frozen=True, slots=True)
class Efficient:
    """torch's memory-efficient kernel: any dtype, causal for as many queries as keys only, no groups."""

    kernel: PartKernel
    name: str = "efficient"

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, scale: float, rule: Rule = PLAIN
    ) -> tuple[Tensor, Tensor]:
        """See `Attention.attend`."""
        window = rule.visible.window
        windowed = window is not None and window < keys.shape[2]
        if windowed or rule.softcap is not None or rule.visible.function is not None or keys.shape[3] % HEAD_DIM_STEP:
            return in_rows(queries, keys, values, scale, rule)
        out, lse = by_parts(queries, keys, values, scale, self._part, fold_below=keys.shape[2])
        return with_sinks(out, lse, rule.sinks)

    def _part(self, queries: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        """Only a chunk's own keys are repeated for the heads of a group: past ones come folded."""
        groups = queries.shape[1] // keys.shape[1]
        if groups > 1:
            keys, values = (tensor.repeat_interleave(groups, 1) for tensor in (keys, values))
        out, lse = self.kernel(queries, keys, values, scale, causal)
        return out, lse[:, :, : queries.shape[2]]


def efficient_kernel(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """Output [B, H, n, Dv] and LSE of at least n rows; as many heads everywhere."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        queries, keys, values, None, True, 0.0, causal, scale=scale
    )
    return out, lse


def allocating_flash(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Allocates what a `FlashKernel` does, row by row as they do, and computes nothing.

    What a kernel sums up in for few queries over many keys is in the profile's reserve.
    """
    batch, heads, rows, _ = queries.shape
    out = queries.new_empty(batch, rows, heads, values.shape[3]).transpose(1, 2)
    return out, queries.new_empty(queries.shape[:3], dtype=torch.float32)


def allocating_efficient(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """Allocates what `efficient_kernel` does and computes nothing."""
    batch, heads, rows, _ = queries.shape
    out = queries.new_empty(batch, rows, heads, values.shape[3]).transpose(1, 2)
    return out, queries.new_empty(batch, heads, -(-rows // _LSE_ROWS) * _LSE_ROWS, dtype=torch.float32)
