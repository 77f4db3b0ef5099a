"""Follows every tensor storage from birth to death and books it to an item. Knows no model and no schedule.

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

from tidekv_cli.engine import ledger


class LiveMeter(TorchDispatchMode):
    """Within `with meter:` storages made there are counted, beside those given to `watch`.

    Each counts as its bytes rounded up to `granularity`, which is 512 in torch's CUDA allocator. An operation that
    takes them above `ceiling_bytes` raises `MemoryError`.
    """

    def __init__(self, granularity: int = 1, ceiling_bytes: int | None = None) -> None:
        super().__init__()
        self._ceiling = sys.maxsize if ceiling_bytes is None else ceiling_bytes
        self.live_bytes = 0
        self.peak_bytes = 0
        self.live = dict.fromkeys(ledger.ITEMS, 0)
        self.peak = dict(self.live)
        self.granularity = granularity
        self._known: dict[int, weakref.ref[Any]] = {}
        self._booked: dict[int, tuple[str, int]] = {}

    def watch(self, tensors: Iterable[Tensor], item: str = ledger.WEIGHTS) -> None:
        """Count tensors that exist already."""
        for tensor in tensors:
            self._follow(tensor, item)

    def restart_peak(self) -> None:
        """Forget the peak: it begins again at what is live."""
        self.peak_bytes, self.peak = self.live_bytes, dict(self.live)

    def __enter__(self) -> LiveMeter:
        ledger.start_reading(self._book)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        ledger.stop_reading()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self._follow(out, ledger.item_of_births())
        elif isinstance(out, (tuple, list)):
            for item in out:
                if isinstance(item, Tensor):
                    self._follow(item, ledger.item_of_births())
        return out

    def _follow(self, tensor: Tensor, item: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        nbytes = -(-storage.nbytes() // self.granularity) * self.granularity
        known, booked, live = self._known, self._booked, self.live

        def freed(_: Any) -> None:
            del known[key]
            final, _size = booked.pop(key)
            live[final] -= nbytes
            self.live_bytes -= nbytes

        known[key] = weakref.ref(storage, freed)
        booked[key] = (item, nbytes)
        live[item] += nbytes
        self.live_bytes += nbytes
        if self.live_bytes > self.peak_bytes:
            if self.live_bytes > self._ceiling:
                raise MemoryError(f"{self.live_bytes} bytes of live tensors are more than the {self._ceiling} allowed")
            self.peak_bytes, self.peak = self.live_bytes, dict(live)

    def _book(self, tensor: Tensor, item: str) -> None:
        key = tensor.untyped_storage()._cdata
        if key not in self._known:
            self._follow(tensor, item)
            return
        before, nbytes = self._booked[key]
        self._booked[key] = (item, nbytes)
        self.live[before] -= nbytes
        self.live[item] += nbytes


def process_peak_bytes() -> int:
    """The most resident memory that this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
