"""Made-up machines for detection: files below a root, a fake NVML, cards as torch would report them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml

from tidekv_cli.machine import CudaCard, Machine

MEBIBYTE = 1 << 20
TOTAL, FREE = 8000 * MEBIBYTE, 6000 * MEBIBYTE  # what psutil says on them
FIXTURES = Path(__file__).parent / "fixtures"
NOT_AVAILABLE = (1 << 64) - 1
UUIDS = ("11111111-aaaa-4000-8000-000000000001", "22222222-bbbb-4000-8000-000000000002")


def never(*_: Any) -> Any:
    """A probe that must not be asked. No `Exception`, so that detection cannot take it for a failed probe."""
    raise SystemExit("this probe must not be asked")


def failing(error: Exception) -> Callable[[], Any]:
    """A probe that raises `error`."""

    def probe() -> Any:
        raise error

    return probe


def machine(root: Path, **probes: Any) -> Machine:
    """A machine without NVIDIA devices; every probe but psutil must be given to be asked."""
    defaults: dict[str, Any] = {
        "environ": {},
        "memory": lambda: (TOTAL, FREE),
        "nvml": never,
        "cuda": never,
        "jtop": never,
        "cuda_fault": lambda index: None,
        "attention_fault": lambda *_: None,
        "set_allocator": lambda variables: None,
    }
    return Machine(root=root, **{**defaults, **probes})


def write(root: Path, **files: object) -> Path:
    """Files below `root`; `__` stands for a slash and `_dot_` for a dot in their names."""
    for name, content in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n", encoding="utf-8")
    return root


def group(root: Path, place: str, limit: object, used: object = None, version: int = 2) -> Path:
    """One control group's two files."""
    directory = root / "sys/fs/cgroup" / ("memory" if version == 1 else "") / place
    directory.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for name, value in zip(names, (limit, used), strict=True):
        if value is not None:
            (directory / name).write_text(f"{value}\n", encoding="ascii")
    return root


def jetson(root: Path, model: str, soc: str, total_mebibytes: int, available_mebibytes: int) -> Path:
    """A Jetson's files. MemFree and swap are there to be taken by mistake."""
    tree = root / "proc/device-tree"
    tree.mkdir(parents=True)
    (tree / "model").write_bytes(model.encode() + b"\0")
    (tree / "compatible").write_bytes(b"nvidia,p0000-0000\0nvidia," + soc.encode() + b"\0")
    figures = {"MemTotal": total_mebibytes, "MemFree": 300, "MemAvailable": available_mebibytes, "SwapFree": 16000}
    (root / "proc/meminfo").write_text("".join(f"{key}: {1024 * value} kB\n" for key, value in figures.items()))
    return root


def agx_orin_64(root: Path) -> Path:
    """The files of a Jetson AGX Orin 64 GB, in the shape of a real dump."""
    shutil.copytree(FIXTURES / "agx_orin_64", root, dirs_exist_ok=True)
    return root


def card(
    index: int = 0,
    name: str = "NVIDIA H200",
    capability: str = "9.0",
    mebibytes: int = 143771,
    integrated: bool | None = False,
    uuid: str | None = UUIDS[0],
    free: Callable[[], int] = never,
) -> CudaCard:
    """A card as torch reports it."""
    return CudaCard(index, name, uuid, capability, mebibytes * MEBIBYTE, integrated, free)


def orin(mebibytes: int = 62841, name: str = "Orin", capability: str = "8.7", **changes: Any) -> CudaCard:
    """An integrated card."""
    return card(name=name, capability=capability, mebibytes=mebibytes, **{"integrated": True, **changes})


@dataclass(frozen=True)
class FakeCard:
    """A card or slice inside the fake NVML; memory in bytes."""

    uuid: str
    name: str | bytes = "NVIDIA H200"
    total: int = 143771 * MEBIBYTE
    free: int = 140000 * MEBIBYTE
    used: int = 3000 * MEBIBYTE
    reserved: int = 771 * MEBIBYTE
    slices: Sequence[FakeCard | None] | None = None


@dataclass
class FakeNvml:
    """The part of `pynvml` that detection uses. `errors` maps a function, or a function and a UUID, to its code."""

    cards: Sequence[FakeCard] = ()
    errors: Mapping[str, int] = field(default_factory=dict)
    driver: str | bytes = "580.95.05"
    nvmlMemory_v2: int = pynvml.nvmlMemory_v2
    open_sessions: int = 0

    def _check(self, function: str, card: FakeCard | None = None) -> None:
        for key in (function, f"{function} {card.uuid}" if card else function):
            if key in self.errors:
                raise pynvml.NVMLError(self.errors[key])

    def nvmlInit(self) -> None:
        self._check("nvmlInit")
        self.open_sessions += 1

    def nvmlShutdown(self) -> None:
        self.open_sessions -= 1
        self._check("nvmlShutdown")

    def nvmlSystemGetDriverVersion(self) -> str | bytes:
        self._check("nvmlSystemGetDriverVersion")
        return self.driver

    def nvmlDeviceGetCount(self) -> int:
        self._check("nvmlDeviceGetCount")
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeCard:
        self._check("nvmlDeviceGetHandleByIndex", self.cards[index])
        return self.cards[index]

    def nvmlDeviceGetUUID(self, handle: FakeCard) -> str:
        self._check("nvmlDeviceGetUUID", handle)
        return handle.uuid

    def nvmlDeviceGetName(self, handle: FakeCard) -> str | bytes:
        self._check("nvmlDeviceGetName", handle)
        return handle.name

    def nvmlDeviceGetMemoryInfo(self, handle: FakeCard, version: int | None = None) -> Any:
        self._check("nvmlDeviceGetMemoryInfo", handle)
        figures = {"total": handle.total, "free": handle.free, "used": handle.used + handle.reserved}
        if version is not None:
            self._check("nvmlDeviceGetMemoryInfo_v2", handle)
            figures |= {"used": handle.used, "reserved": handle.reserved}
        return SimpleNamespace(**figures)

    def nvmlDeviceGetMigMode(self, handle: FakeCard) -> list[int]:
        self._check("nvmlDeviceGetMigMode", handle)
        if handle.slices is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: FakeCard) -> int:
        self._check("nvmlDeviceGetMaxMigDeviceCount", handle)
        return len(handle.slices or ())

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: FakeCard, index: int) -> FakeCard:
        self._check("nvmlDeviceGetMigDeviceHandleByIndex", handle)
        part = (handle.slices or ())[index]
        if part is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return part


def with_cards(root: Path, *cards: CudaCard, nvml: Any = never, **probes: Any) -> Machine:
    """A PC with these cards; `nvml` is a `FakeNvml`, or a probe."""
    write(root, dev__nvidiactl="")
    load = (lambda: nvml) if isinstance(nvml, FakeNvml) else nvml
    return machine(root, **{"cuda": lambda: cards, "nvml": load, **probes})
