"""Rotations whose frequencies depend on the longest position that they see, given the whole prompt's by every chunk.

transformers' types `dynamic` and `longrope` look at the positions of one call only: a chunk of its own would be
rotated otherwise than in the whole prompt. Knows no layer and no schedule.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_MOVING = ("dynamic", "longrope")


class MovingRotary:
    """The rotary modules of `model` that move; none in most models, and then nothing is done."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [module for module in model.modules() if _moves(module)]
        self._fresh = [_state(module) for module in self._modules]

    @property
    def moves(self) -> bool:
        """Whether there are any."""
        return bool(self._modules)

    def reset(self) -> None:
        """As the model was built: what one prompt has moved is nothing to the next."""
        for module, (attributes, buffers) in zip(self._modules, self._fresh, strict=True):
            vars(module).update(copy.copy(attributes))
            for name, buffer in buffers.items():
                module.register_buffer(name, buffer.clone(), persistent=False)

    @contextmanager
    def seeing(self, last: int) -> Iterator[None]:
        """Within it every call sees position `last` too."""
        try:
            for module in self._modules:
                vars(module)["forward"] = _with_position(module.forward, last)
            yield
        finally:
            for module in self._modules:
                vars(module).pop("forward", None)


def _moves(module: nn.Module) -> bool:
    kind = getattr(module, "rope_type", None)
    kinds = kind.values() if isinstance(kind, dict) else [kind]
    return any(isinstance(name, str) and any(word in name for word in _MOVING) for name in kinds)


def _state(module: nn.Module) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Numbers and buffers of a module, as they are now."""
    numbers = {name: value for name, value in vars(module).items() if isinstance(value, (int, float))}
    return numbers, {name: buffer.clone() for name, buffer in module.named_buffers(recurse=False)}


def _with_position(forward: Callable[..., Any], last: int) -> Callable[..., Any]:
    def seeing(hidden: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        more = torch.cat((position_ids, position_ids.new_full((*position_ids.shape[:-1], 1), last)), -1)
        tables = forward(hidden, more, *args, **kwargs)
        return tuple(map(_shortened, tables, itertools.repeat(position_ids.shape[-1])))

    return seeing


def _shortened(table: Tensor, rows: int) -> Tensor:
    """A table [B, n, D] without the row of the added position."""
    return table[..., :rows, :]
