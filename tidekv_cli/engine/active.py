"""The active layer's full-prompt KV, the only uncompressed KV there is. Knows no selector."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from tidekv_cli.engine.adapter import KeysOnlyError
from tidekv_cli.engine.attention import PLAIN, Attention, Rule
from tidekv_cli.engine.ledger import ACTIVE_KV, book
from tidekv_cli.engine.masks import CAUSAL
from tidekv_cli.engine.observation import Observer


class ActiveKV:
    """Keys and values [1, Hkv, L, D] of the layer at work, and attention over them.

    `reused` writes into one buffer of `capacity` rows that every layer uses again; otherwise the tensors are held
    as the layer computed them and dropped by `clear`. `longest` is the number of tokens with those to come.
    """

    def __init__(
        self, attention: Attention, observer: Observer | None, capacity: int, reused: bool, longest: int
    ) -> None:
        self._attention = attention
        self.observer = observer
        self._capacity = capacity
        self._reused = reused
        self._longest = longest
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._length = 0
        self._keys_only = False
        self.rule = PLAIN
        self.after_attention: Callable[[], None] | None = None

    @property
    def keys(self) -> Tensor:
        """[1, Hkv, L, D]."""
        assert self._keys is not None
        return self._keys[:, :, : self._length]

    @property
    def values(self) -> Tensor:
        """[1, Hkv, L, D]."""
        assert self._values is not None
        return self._values[:, :, : self._length]

    def place(self, start: int, keys_only: bool) -> None:
        """The next chunk begins at row `start`; `keys_only` if nothing after its keys and values is wanted."""
        self._length, self._keys_only = start, keys_only

    def clear(self) -> None:
        """Ready for the next layer."""
        self._length = 0
        if not self._reused:
            self._keys = self._values = None

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Take a chunk's rows. Raises `KeysOnlyError` when the rest of the layer is not wanted."""
        if self._reused and not (_alike(self._keys, keys) and _alike(self._values, values)):
            self._keys = self._values = None  # layers of some models differ in their shapes: first let go, then take
        self._keys = self._stored(self._keys, keys)
        self._values = self._stored(self._values, values)
        self._length += keys.shape[2]
        book(ACTIVE_KV, self._keys, self._values)
        if self._keys_only:
            raise KeysOnlyError
        return self.keys, self.values

    def _stored(self, held: Tensor | None, rows: Tensor) -> Tensor:
        if not self._reused:
            return rows if held is None else torch.cat((held, rows), 2)
        if held is None:
            _, heads, _, size = rows.shape
            held = rows.new_empty(1, heads, self._capacity, size)
        held[:, :, self._length : self._length + rows.shape[2]] = rows
        return held

    def attend(self, queries: Tensor, scale: float, rule: Rule) -> Tensor:
        """Output [1, Hq, n, Dv] of the chunk's queries over the prompt so far; the observer sees queries and LSE.

        `rule` is the layer's, and stays to be read after it: without a window that hides nothing from anybody.
        """
        window = rule.visible.window
        if window is not None and window >= self._longest:
            rule = replace(rule, visible=CAUSAL)
        self.rule = rule
        out, lse = self._attention.attend(queries, self.keys, self.values, scale, rule)
        if self.observer is not None and rule.visible.everything:
            start = self._length - queries.shape[2]
            self.observer.catch(queries, self.keys, lse, start, scale, rule.softcap)
        if self.after_attention is not None:
            self.after_attention()
        return out


def _alike(held: Tensor | None, rows: Tensor) -> bool:
    return held is not None and (held.shape[1], held.shape[3]) == (rows.shape[1], rows.shape[3])
