"""Rows of a layer's keys, or of its values: the older ones in few bits, the newest as they are. Knows no attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tidekv_cli.engine.ledger import CACHE, book
from tidekv_cli.engine.stores.low_bit import Steps, packed, quantised, restored, unpacked

AT_A_TIME = 2048  # rows a head that are in full precision for a moment


@dataclass(frozen=True, slots=True)
class Layout:
    """Groups are `tokens` by `channels`, of which one is 1. Of L rows those from `border(L)` on stay as they are.

    `border` never falls, comes in steps of `tokens`, and leaves out at most `residual` rows.
    """

    bits: int
    tokens: int
    channels: int
    residual: int
    border: Callable[[int], int]


class LowBitRows:
    """Rows [Hkv, L, D] with room for `capacity` of them.

    `codes` are uint8 [Hkv, rows, D bits / 8], `scales` and `zeros` bfloat16 [Hkv, rows / tokens, D / channels], and
    `recent` the rows that stay as they are.
    """

    def __init__(self, like: Tensor, layout: Layout, length: int, capacity: int) -> None:
        """Of the shape and dtype of `like` [Hkv, *, D]; the first `length` rows are yet to be filled."""
        heads, _, width = like.shape
        coded, before = layout.border(capacity), layout.border(length)
        self._layout, self.capacity = layout, capacity
        self.codes = like.new_empty(heads, coded, width * layout.bits // 8, dtype=torch.uint8)
        steps = heads, coded // layout.tokens, width // layout.channels
        self.scales, self.zeros = (like.new_empty(steps, dtype=torch.bfloat16) for _ in range(2))
        self.recent = like.new_empty(heads, layout.residual if coded > before else capacity - before, width)
        book(CACHE, *self.held)

    @property
    def held(self) -> tuple[Tensor, ...]:
        """All that is held."""
        return self.codes, self.scales, self.zeros, self.recent

    @property
    def nbytes(self) -> int:
        """Bytes held, free room included."""
        return sum(held.nbytes for held in self.held)

    def fill(self, source: Tensor, indices: Tensor) -> None:
        """Take of `source` [Hkv, S, D] the rows `indices` [Hkv, L] as the first L."""
        length = indices.shape[1]
        border, step = self._layout.border(length), self._step()
        for start in range(0, border, step):
            stop = min(start + step, border)
            self._quantise(start, _picked(source, indices[:, start:stop]))
        self.recent[:, : length - border] = _picked(source, indices[:, border:])

    def append(self, rows: Tensor, length: int) -> None:
        """Add `rows` [Hkv, n, D] to the `length` that there are."""
        stop = length + rows.shape[1]
        before, border = self._layout.border(length), self._layout.border(stop)
        if border == before:
            self.recent[:, length - before : stop - before] = rows
            return
        recent = torch.cat((self.recent[:, : length - before], rows), 1)
        for start in range(before, border, self._step()):
            end = min(start + self._step(), border)
            self._quantise(start, recent[:, start - before : end - before])
        self.recent[:, : stop - border] = recent[:, border - before :]

    def rows(self, start: int, stop: int, length: int) -> Tensor:
        """Rows start .. stop-1 of the `length` that there are, as they are stored; `start` begins a group."""
        border, layout = self._layout.border(length), self._layout
        if start >= border:
            return self.recent[:, start - border : stop - border]
        last = min(stop, border)
        whole = -(-last // layout.tokens) * layout.tokens  # where the last group ends
        groups = slice(start // layout.tokens, whole // layout.tokens)
        codes = self._grouped(unpacked(self.codes[:, start:whole], layout.bits))
        steps = Steps(*(held[:, groups, None, :, None] for held in (self.scales, self.zeros)))
        coded = restored(codes, steps).to(self.recent.dtype).flatten(3).flatten(1, 2)[:, : last - start]
        return coded if stop <= border else torch.cat((coded, self.recent[:, : stop - border]), 1)

    def grown(self, length: int, capacity: int) -> LowBitRows:
        """The same `length` rows, with room for `capacity`."""
        new = LowBitRows(self.recent, self._layout, length, capacity)
        border = self._layout.border(length)
        new.codes[:, :border] = self.codes[:, :border]
        for target, held in ((new.scales, self.scales), (new.zeros, self.zeros)):
            target[:, : border // self._layout.tokens] = held[:, : border // self._layout.tokens]
        new.recent[:, : length - border] = self.recent[:, : length - border]
        return new

    def _step(self) -> int:
        return max(AT_A_TIME // self._layout.tokens, 1) * self._layout.tokens

    def _grouped(self, rows: Tensor) -> Tensor:
        """[Hkv, n, D] as [Hkv, groups of tokens, tokens, groups of channels, channels]."""
        heads, count, width = rows.shape
        layout = self._layout
        shape = heads, count // layout.tokens, layout.tokens, width // layout.channels, layout.channels
        return rows.reshape(shape)

    def _quantise(self, start: int, rows: Tensor) -> None:
        layout, stop = self._layout, start + rows.shape[1]
        codes, steps = quantised(self._grouped(rows.float()), layout.bits, 2 if layout.tokens > 1 else 4)
        groups = slice(start // layout.tokens, stop // layout.tokens)
        self.codes[:, start:stop] = packed(codes.reshape(rows.shape), layout.bits)
        self.scales[:, groups], self.zeros[:, groups] = (part[:, :, 0, :, 0] for part in (steps.scale, steps.zero))


def _picked(source: Tensor, indices: Tensor) -> Tensor:
    """Rows `indices` [Hkv, n] of each head of `source` [Hkv, S, D]."""
    out = source.new_empty(*indices.shape, source.shape[2])
    for head, index, target in zip(source.unbind(), indices.unbind(), out.unbind(), strict=True):
        torch.index_select(head, 0, index, out=target)
    return out
