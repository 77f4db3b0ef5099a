"""What detection may look at, as one object that a test can make up. Knows no device and decides nothing."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from tidekv_cli.errors import MemoryExhaustedError, is_out_of_memory
from tidekv_cli.jtop import run_jtop


@dataclass(frozen=True, slots=True)
class CudaCard:
    """One device as torch reports it. `integrated` and `uuid` are None where this torch does not say.

    `free` gives the free bytes by `torch.cuda.mem_get_info`; it starts CUDA on the card and may raise.
    """

    index: int
    name: str
    uuid: str | None
    capability: str
    total_bytes: int
    integrated: bool | None
    free: Callable[[], int]


def psutil_memory() -> tuple[int, int]:
    """Total and available bytes of the machine."""
    memory = psutil.virtual_memory()
    return memory.total, memory.available


def import_nvml() -> Any:
    """The module `pynvml` of nvidia-ml-py. Raises `ImportError`."""
    return importlib.import_module("pynvml")


def torch_cards() -> tuple[CudaCard, ...]:
    """CUDA's devices in CUDA's order. Imports torch; raises `RuntimeError` where it cannot use CUDA."""
    import torch

    if not torch.backends.cuda.is_built():
        raise RuntimeError("this torch is built without CUDA")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.init()
        return tuple(_torch_card(index) for index in range(torch.cuda.device_count()))


def _torch_card(index: int) -> CudaCard:
    import torch

    properties = torch.cuda.get_device_properties(index)
    integrated, uuid = getattr(properties, "is_integrated", None), getattr(properties, "uuid", None)
    return CudaCard(
        index=index,
        name=properties.name,
        uuid=None if uuid is None else str(uuid),
        capability=f"{properties.major}.{properties.minor}",
        total_bytes=properties.total_memory,
        integrated=None if integrated is None else bool(integrated),
        free=partial(_torch_free, index),
    )


def _torch_free(index: int) -> int:
    import torch

    return torch.cuda.mem_get_info(index)[0]


def torch_fault(index: int) -> str | None:
    """Why card `index` computes nothing, None if it does: a torch that is not built for it says so at the first use.

    Raises `MemoryExhaustedError` where the card is full.
    """
    import torch

    try:
        with warnings.catch_warnings(), _memory_named(index):
            warnings.simplefilter("ignore")
            total = torch.arange(8, device=f"cuda:{index}").sum().item()
    except (RuntimeError, AssertionError) as error:
        return reason_of(error)
    return None if total == 28 else f"it adds up 0 to 7 to {total}"


def torch_attention_fault(name: str, index: int, dtype: str, heads: tuple[int, int, int], softcap: bool) -> str | None:
    """Why attention `name` cannot be used on card `index` for (Hq, Hkv, D) heads, None if it can: it is tried.

    Raises `MemoryExhaustedError` where the card is full.
    """
    import torch

    from tidekv_cli.engine.backends import attention_backend, failure

    with _memory_named(index):
        device = torch.device("cuda", index)
        return failure(attention_backend(name, "cuda"), device, getattr(torch, dtype), heads, softcap)


@contextmanager
def _memory_named(index: int) -> Iterator[None]:
    """A full card is no broken one."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryExhaustedError(
            f"CUDA device {index} has no memory left to try anything: {reason_of(error)}",
            "see what else takes its memory, or use --device cpu",
        ) from error


def set_torch_allocator(variables: Mapping[str, str]) -> None:
    """Set environment variables that steer torch on a GPU, unless the user has set them.

    Detection has started torch's allocator by now, so it is told as well.
    """
    new = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(new)
    settings = new.get("PYTORCH_CUDA_ALLOC_CONF")
    if settings is None or "PYTORCH_ALLOC_CONF" in os.environ:  # its newer name
        return
    import torch

    tell = getattr(torch.cuda.memory, "_set_allocator_settings", None)
    if tell is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its successor is not in every torch that is supported
            tell(settings)


@dataclass(frozen=True, slots=True)
class Machine:
    """`root` holds proc/, sys/ and dev/. Each callable is one probe, which may raise any `Exception`."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    memory: Callable[[], tuple[int, int]] = psutil_memory
    nvml: Callable[[], Any] = import_nvml
    cuda: Callable[[], Sequence[CudaCard]] = torch_cards
    jtop: Callable[[], Mapping[str, Any]] = run_jtop
    cuda_fault: Callable[[int], str | None] = torch_fault
    attention_fault: Callable[[str, int, str, tuple[int, int, int], bool], str | None] = torch_attention_fault
    set_allocator: Callable[[Mapping[str, str]], None] = set_torch_allocator

    @property
    def visible_devices(self) -> tuple[str, ...] | None:
        """The entries of CUDA_VISIBLE_DEVICES that count: those before an empty or negative one. None if not set."""
        text = self.environ.get("CUDA_VISIBLE_DEVICES")
        if text is None:
            return None
        entries = [entry.strip() for entry in text.split(",")]
        end = next((at for at, entry in enumerate(entries) if not entry or entry.startswith("-")), len(entries))
        return tuple(entries[:end])

    def exists(self, path: str) -> bool:
        """Whether `path` is there below `root`; what may not be looked at is not."""
        return os.path.exists(self.root / path)


THIS_MACHINE = Machine()


def reason_of(error: Exception) -> str:
    """The first line of what `error` says, or its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
