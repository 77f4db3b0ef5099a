"""What device there is, how much memory it has, and how each figure was read. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from tidekv_cli.errors import DeviceError, UsageError


@dataclass(frozen=True, slots=True)
class Device:
    """`total_bytes` and `free_bytes` are None where they cannot be read; `sources` names the source of each."""

    name: str
    kind: str
    total_bytes: int | None
    free_bytes: int | None
    unified: bool
    sources: Mapping[str, str]


def detect_device(request: str, root: Path = Path("/")) -> Device:
    """The device that `--device REQUEST` means. Raises `DeviceError` where it cannot be used."""
    if request in ("auto", "cpu"):
        return _cpu(root)
    if not re.fullmatch(r"cuda(:\d{1,3})?", request):
        raise UsageError(f"--device {request} is not known", "use auto, cpu or cuda[:N]")
    raise DeviceError(f"device {request} cannot be used: this version computes on the CPU only", "use --device cpu")


def _cpu(root: Path) -> Device:
    memory = psutil.virtual_memory()
    total, free = memory.total, memory.available
    sources = {"total": "psutil total", "free": "psutil available"}
    limit, left = _cgroup(root)
    if limit is not None and limit < total:
        total, sources["total"] = limit, "cgroup limit"
    if left is not None and left < free:
        free, sources["free"] = left, "cgroup limit less usage"
    return Device(_cpu_name(root), "cpu", total, free, False, sources)


def _cpu_name(root: Path) -> str:
    try:
        for line in (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.lower().startswith("model name"):
                return line.split(":", 1)[1].strip()
    except (OSError, IndexError):
        pass
    return "CPU"


def _cgroup(root: Path) -> tuple[int | None, int | None]:
    """The least limit, and the least left of it, over this process's control group and its ancestors (v1 and v2)."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None, None
    limits: list[int] = []
    left: list[int] = []
    for line in lines:
        controllers, _, group = line.partition(":")[2].partition(":")
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base, names = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        place = base / group.lstrip("/")
        for directory in (place, *place.parents):
            limit, used = (_number(directory / name) for name in names)
            if limit is not None:
                limits.append(limit)
                left.append(max(limit - (used or 0), 0))
            if directory == base:
                break
    return min(limits, default=None), min(left, default=None)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # absent, or "max"
        return None
