"""What the engine's tensors are for, told to whoever measures. Costs nothing where nobody does.

Items: weights, cache, bridge, active_kv, scoring; all else that is alive is workspace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

WORKSPACE, WEIGHTS, CACHE, BRIDGE, ACTIVE_KV, SCORING = ITEMS = (
    "workspace",
    "weights",
    "cache",
    "bridge",
    "active_kv",
    "scoring",
)

_readers: list[Callable[[Tensor, str], None]] = []
_births = [WORKSPACE]


def book(item: str, *tensors: Tensor) -> None:
    """The storages of `tensors` are held for `item` from now on."""
    if _readers:
        for tensor in tensors:
            _readers[-1](tensor, item)


@contextmanager
def births_booked(item: str) -> Iterator[None]:
    """What is allocated inside is for `item`, unless booked otherwise."""
    _births.append(item)
    try:
        yield
    finally:
        _births.pop()


def item_of_births() -> str:
    """What a tensor made now is for."""
    return _births[-1]


def start_reading(reader: Callable[[Tensor, str], None]) -> None:
    """Let `reader` hear of every booking until `stop_reading`; the newest reader alone hears."""
    _readers.append(reader)


def stop_reading() -> None:
    """The newest reader hears no more."""
    _readers.pop()
