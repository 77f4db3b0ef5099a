"""Which keys a query sees, read from transformers' mask functions. Knows no attention kernel and no cache."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

# (batch, head, query position, key position) -> whether it is seen; positions are tensors that broadcast.
MaskFunction = Callable[[Any, Any, Tensor, Tensor], Tensor]
_SAMPLED = (1 << 20) + 7, (1 << 20) - 1000  # positions: a window that is longer shows nowhere else either


@dataclass(frozen=True, slots=True)
class Visible:
    """A query at position p sees no key after p, and of the others all, the last `window`, or what `function` says."""

    window: int | None = None
    function: MaskFunction | None = None

    @property
    def everything(self) -> bool:
        """Whether all earlier keys are seen, so that which of them stay is a selector's business."""
        return self.window is None and self.function is None

    def seen(self, first_query: int, queries: int, keys: int, device: torch.device) -> Tensor:
        """bool [queries, keys]: what queries at first_query, first_query + 1, .. see of keys at 0, 1, .."""
        at = torch.arange(keys, device=device)[None, :]
        query = torch.arange(first_query, first_query + queries, device=device)[:, None]
        seen = at <= query
        if self.window is not None:
            seen = seen & (at > query - self.window)
        return seen if self.function is None else seen & self.function(0, 0, query, at)


CAUSAL = Visible()
_known: dict[Hashable, Visible] = {}


def visible(function: MaskFunction) -> Visible:
    """What a mask function comes to. Equal functions are looked at once.

    One that holds tensors is kept as it is, since what it says may depend on their values; so is one that holds what
    cannot be compared.
    """
    try:
        key = _identity(function)
    except _UnknownError:
        return Visible(function=function)
    if key not in _known:
        # Modes like that of fake tensors are a thread's own: in another one the sampled rows are real.
        with ThreadPoolExecutor(1) as outside:
            _known[key] = outside.submit(_classified, function).result()
    return _known[key]


class _UnknownError(Exception):
    pass


def _identity(value: Any) -> Hashable:
    """Equal for two functions of the same code over the same values."""
    if isinstance(value, FunctionType):
        closure = (cell.cell_contents for cell in value.__closure__ or ())
        defaults = (*(value.__defaults__ or ()), *sorted((value.__kwdefaults__ or {}).items()))
        return value.__code__, *(_identity(held) for held in (*closure, *defaults))
    if isinstance(value, (tuple, list)):
        return tuple(_identity(item) for item in value)
    if isinstance(value, Tensor) or not isinstance(value, Hashable):
        raise _UnknownError
    return value


def _classified(function: MaskFunction) -> Visible:
    windows = {_window(function, position) for position in _SAMPLED}
    if windows == {position + 1 for position in _SAMPLED}:
        return CAUSAL
    (window,) = windows if len(windows) == 1 else (None,)
    return Visible(function=function) if window is None else Visible(window)


def _window(function: MaskFunction, position: int) -> int | None:
    """How many keys up to its own a query at `position` sees, if they are the last ones and no others."""
    keys = torch.arange(position + 2)
    seen = function(0, 0, torch.tensor(position), keys).expand(len(keys))
    count = int(seen.sum())
    expected = (keys > position - count) & (keys <= position)
    return count if count and torch.equal(seen, expected) else None
