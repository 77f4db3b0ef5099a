"""Numbers that decide how much is kept, read from a tensor. The one place where data become sizes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def numbers(tensor: Tensor, simulated: Sequence[float]) -> list[float]:
    """The numbers of a small tensor [n]; on fake tensors, which have none, what the caller says to plan with."""
    if isinstance(tensor, FakeTensor):
        return list(simulated)
    return [float(value) for value in tensor.tolist()]
