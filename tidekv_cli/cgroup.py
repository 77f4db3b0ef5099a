"""Memory of this process's control groups (v1 and v2). Knows nothing of devices, nor of what the machine has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class CgroupMemory:
    """The least limit, and the least that any limit leaves, in bytes; None where nothing limits."""

    limit_bytes: int | None
    left_bytes: int | None


def read_cgroup(root: Path) -> CgroupMemory:
    """Over this process's control group and its ancestors, below `root`. What cannot be read does not limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return CgroupMemory(None, None)
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
    return CgroupMemory(min(limits, default=None), min(left, default=None))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # absent, or "max"
        return None
