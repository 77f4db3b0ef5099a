"""Follows every tensor storage from birth to death. Knows nothing of what the tensors are for.

Live bytes are those of storages that some tensor holds; allocator slack and library memory are not among them.
"""

from __future__ import annotations

import resource
import sys
import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LiveMeter(TorchDispatchMode):
    """Within `with meter:`, `live_bytes` and `peak_bytes` count storages made there, plus those given to `watch`."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def watch(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that exist already, for example the weights."""
        for tensor in tensors:
            self._follow(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self._follow(out)
        elif isinstance(out, (tuple, list)):
            for item in out:
                if isinstance(item, Tensor):
                    self._follow(item)
        return out

    def _follow(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        nbytes = storage.nbytes()
        known = self._known

        def freed(_: Any) -> None:
            del known[key]
            self.live_bytes -= nbytes

        known[key] = weakref.ref(storage, freed)
        self.live_bytes += nbytes
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes


def process_peak_bytes() -> int:
    """The most resident memory that this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
