"""Numbers that decide how much is kept, read from a tensor. The one place where data become sizes.

And the one that tells fake tensors, which have no data, from others.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def numbers(tensor: Tensor, simulated: Sequence[float]) -> list[float]:
    """The numbers of a small tensor [n]; on fake tensors, which have none, what the caller says to plan with."""
    if is_fake(tensor):
        return list(simulated)
    return [float(value) for value in tensor.tolist()]


def is_fake(tensor: Tensor) -> bool:
    """Whether this is a simulation."""
    return isinstance(tensor, FakeTensor)
