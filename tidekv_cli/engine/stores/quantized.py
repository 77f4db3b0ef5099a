"""Quantised store: all but the newest rows in few bits. Source: Liu et al., KIVI (2024).

Keys are rounded per channel, in groups of tokens, values per token, in groups of channels. The newest rows stay as they
are: of L rows the last L mod R keys and the last R values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tidekv_cli.engine.attention import Attention, Rule, all_seen, merge, with_sinks
from tidekv_cli.engine.selectors import Selection
from tidekv_cli.engine.stores import MakeStore, Store
from tidekv_cli.engine.stores.low_bit_rows import AT_A_TIME, Layout, LowBitRows
from tidekv_cli.errors import ModelError, UsageError

_QUERIES = 256  # at a time
_MOST_RESIDUAL = 4096


@dataclass(frozen=True, slots=True)
class Quantized(MakeStore):
    """Makes quantised stores, as `MakeStore`; `group` in numbers, `residual` R in rows. Raises `UsageError`.

    A group of values is narrower where the head size is no multiple of it: as many channels as divide it, at most.
    """

    bits: int = 4
    group: int = 32
    residual: int = 128

    def __post_init__(self) -> None:
        if self.bits not in (2, 4, 8):
            raise UsageError(f"bits={self.bits} is impossible", "use 2, 4 or 8")
        if not 1 <= self.group <= _MOST_RESIDUAL:
            raise UsageError(f"group={self.group} is impossible", f"use a number from 1 to {_MOST_RESIDUAL}")
        if not 1 <= self.residual <= _MOST_RESIDUAL:
            raise UsageError(f"residual={self.residual} is impossible", f"use a number from 1 to {_MOST_RESIDUAL}")
        if self.residual % self.group:
            raise UsageError(
                f"residual={self.residual} is no multiple of group={self.group}", f"use {self.group}, for example"
            )

    def __call__(
        self, keys: Tensor, values: Tensor, kept: Selection, slack: int, attention: Attention
    ) -> QuantizedStore:
        """See `QuantizedStore`."""
        return QuantizedStore(keys, values, kept, slack, attention, self)

    @property
    def step(self) -> int:
        """Keys are rounded `residual` at a time."""
        return self.residual

    @property
    def settled(self) -> int:
        """Full precision is for so many rows at a time, and the newest ones."""
        return AT_A_TIME + 2 * self.residual

    def key_layout(self) -> Layout:
        """Keys are rounded R at a time."""
        return Layout(self.bits, self.group, 1, self.residual, lambda rows: rows // self.residual * self.residual)

    def value_layout(self, width: int) -> Layout:
        """Values [.., width] are rounded when they are older than R."""
        channels = next(size for size in range(min(self.group, width), 0, -1) if width % size == 0)
        return Layout(self.bits, 1, channels, self.residual, lambda rows: max(rows - self.residual, 0))


class QuantizedStore(Store):
    """One layer's compact cache; every head keeps as many rows, and has room for `slack` of new tokens."""

    def __init__(
        self, keys: Tensor, values: Tensor, kept: Selection, slack: int, attention: Attention, kind: Quantized
    ) -> None:
        """Take the rows `kept` of `keys` and `values` [1, Hkv, S, D], some at a time.

        Raises `ModelError` where a row does not fill whole bytes.
        """
        assert kept.counts is None
        for width in (keys.shape[3], values.shape[3]):
            if width * kind.bits % 8:
                raise ModelError(
                    f"heads of {width} numbers cannot be kept in {kind.bits} bits each", "use bits=8 or another store"
                )
        self._attention, self._kind = attention, kind
        self._length = self._prompt_length = length = kept.indices.shape[1]
        self._keys = LowBitRows(keys[0], kind.key_layout(), length, length + slack)
        self._values = LowBitRows(values[0], kind.value_layout(values.shape[3]), length, length + slack)
        self._keys.fill(keys[0], kept.indices)
        self._values.fill(values[0], kept.indices)
        self._fresh: tuple[Tensor, Tensor] | None = None  # rows [Hkv, n, D] whose queries are yet to be answered

    @property
    def length(self) -> int:
        """See `Store.length`."""
        return self._length

    @property
    def prompt_length(self) -> int:
        """See `Store.prompt_length`."""
        return self._prompt_length

    @property
    def nbytes(self) -> int:
        """Bytes held, slack included."""
        return self._keys.nbytes + self._values.nbytes

    def trim(self, rows: Selection) -> None:
        """Not possible: keys are rounded together with their neighbours."""
        raise NotImplementedError

    def pretend(self, tokens: int) -> None:
        """See `Store.pretend`."""
        self._length += tokens

    @property
    def _settled(self) -> int:
        return self._length - (0 if self._fresh is None else self._fresh[0].shape[1])

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add rows [1, Hkv, n, D] of new tokens, which stay as they are until `attend`; returns them."""
        self._settle()
        stop, capacity = self.length + keys.shape[2], self._keys.capacity
        if stop > capacity:
            capacity = max(stop, capacity * 3 // 2)
            grown = self._keys.grown(self.length, capacity), self._values.grown(self.length, capacity)
            self._keys, self._values = grown
        self._fresh, self._length = (keys[0], values[0]), stop
        return keys, values

    def _settle(self) -> None:
        """Take the fresh rows, and round what is too old by now."""
        if self._fresh is not None:
            keys, values = self._fresh
            self._keys.append(keys, self._settled)
            self._values.append(values, self._settled)
            self._fresh = None

    def rows(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values [1, Hkv, stop - start, D] as they are held; `start` is a multiple of the group."""
        settled, more = self._settled, max(stop - self._settled, 0)
        found = []
        for held, fresh in zip((self._keys, self._values), self._fresh or (None, None), strict=True):
            rows = held.rows(start, min(stop, settled), settled)
            found.append(rows if fresh is None or not more else torch.cat((rows, fresh[:, :more]), 1))
        return found[0][None], found[1][None]

    def attend(self, queries: Tensor, scale: float, rule: Rule) -> Tensor:
        """Output [1, Hq, n, Dv] of the newest n tokens' queries over all rows up to their own; `rule` hides none.

        No query sees a row rounded that is among the newest R at its time.
        """
        first = self.length - queries.shape[2]
        outputs = []
        for block in queries.split(_QUERIES, 2):
            outputs.append(self._attended(block, first, scale, rule))
            first += block.shape[2]
        self._settle()
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)

    def _attended(self, queries: Tensor, first: int, scale: float, rule: Rule) -> Tensor:
        """As `attend`, of queries from row `first` on: the newest rows with them, older ones some at a time."""
        plain, group = Rule(softcap=rule.softcap), self._kind.group
        border = max(self._settled - self._kind.residual, 0) // group * group
        out, lse = self._attention.attend(queries, *self.rows(border, first + queries.shape[2]), scale, plain)
        merged = out.float(), lse
        step = max(AT_A_TIME // group, 1) * group
        for start in range(0, border, step):
            older = self.rows(start, min(start + step, border))
            merged = merge(merged, all_seen(self._attention, queries, *older, scale, plain))
        return with_sinks(*merged, rule.sinks)[0].to(queries.dtype)
