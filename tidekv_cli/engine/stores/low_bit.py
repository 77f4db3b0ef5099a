"""Rounding of numbers to few bits, group by group, and their packing into bytes. Knows no cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Steps:
    """Of a group: code c stands for zero + c scale; both bfloat16, computed with in float32."""

    scale: Tensor
    zero: Tensor


def quantised(numbers: Tensor, bits: int, dim: int) -> tuple[Tensor, Steps]:
    """Codes uint8 of float32 `numbers`, each of whose runs along `dim` is a group; steps with `dim` of size 1.

    Every number lies within half a step of what its code stands for: the stored zero is at most the least of the
    group, the stored scale large enough for the greatest. Numbers up to 1e38; source: Liu et al., KIVI (2024).
    """
    levels = (1 << bits) - 1
    least, most = numbers.aminmax(dim=dim, keepdim=True)
    zero = least.bfloat16()
    zero = torch.where(zero.float() > least, torch.nextafter(zero, zero.new_tensor(float("-inf"))), zero)
    scale = ((most - zero.float()) / levels).bfloat16()
    short = zero.float() + levels * scale.float() < most
    scale = torch.where(short, torch.nextafter(scale, scale.new_tensor(float("inf"))), scale)
    step = scale.float().masked_fill_(scale == 0, 1.0)  # all alike, and the zero itself
    codes = (numbers - zero.float()).div_(step).round_().clamp_(0, levels)
    return codes.to(torch.uint8), Steps(scale, zero)


def restored(codes: Tensor, steps: Steps) -> Tensor:
    """What codes stand for, in float32."""
    return codes.float().mul_(steps.scale.float()).add_(steps.zero.float())


def packed(codes: Tensor, bits: int) -> Tensor:
    """Codes uint8 [.., D] as w = D bits / 8 bytes: byte i holds those at i, i + w, .., from its lowest bits on.

    D is a multiple of 8 / bits.
    """
    first, *others = codes.chunk(8 // bits, -1)
    out = first.clone()
    for place, part in enumerate(others, 1):
        out |= part << (bits * place)
    return out


def unpacked(rows: Tensor, bits: int) -> Tensor:
    """The codes that `packed` took."""
    width = rows.shape[-1]
    out = rows.new_empty(*rows.shape[:-1], width * 8 // bits)
    for place, part in enumerate(out.split(width, -1)):
        part.copy_(rows >> (bits * place)).bitwise_and_((1 << bits) - 1)
    return out
