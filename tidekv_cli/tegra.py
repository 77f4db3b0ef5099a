"""What a Tegra board says of itself: device-tree and meminfo. Knows no CUDA and no control group.

`compatible` ends in the SoC (`nvidia,tegra234` is Orin, `nvidia,tegra264` Thor). The model does not tell the memory.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_COMPATIBLE, _MODEL = "proc/device-tree/compatible", "proc/device-tree/model"
_NODES = ("dev/nvhost-gpu", "dev/nvgpu")  # a container often hides the device-tree, not these


@dataclass(frozen=True, slots=True)
class Tegra:
    """`sign` is what shows that this is a Tegra, or None; `board` and `soc` are None where they cannot be read."""

    sign: str | None
    board: str | None
    soc: str | None


@dataclass(frozen=True, slots=True)
class Meminfo:
    """Bytes, or None. Not MemFree, which leaves out what the kernel would give back, and never swap."""

    total_bytes: int | None
    available_bytes: int | None


def read_tegra(root: Path, notes: list[str]) -> Tegra:
    """The board below `root`. A file that is there and cannot be read adds to `notes`."""
    compatible = _strings(root, _COMPATIBLE, notes)
    soc = next((name.split(",")[1] for name in reversed(compatible) if name.startswith("nvidia,tegra")), None)
    sign = _COMPATIBLE if soc else next((node for node in _NODES if os.path.exists(root / node)), None)
    board = _strings(root, _MODEL, notes) if sign else []
    return Tegra(sign, board[0] if board else None, soc)


def read_meminfo(root: Path) -> Meminfo:
    """MemTotal and MemAvailable of proc/meminfo below `root`."""
    figures: dict[str, int] = {}
    try:
        lines = (root / "proc/meminfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, rest = line.partition(":")
        number, _, unit = rest.strip().partition(" ")
        if number.isdecimal() and unit == "kB":
            figures[key] = int(number) * 1024
    return Meminfo(figures.get("MemTotal"), figures.get("MemAvailable"))


def _strings(root: Path, path: str, notes: list[str]) -> list[str]:
    """The NUL-separated strings of a device-tree property."""
    try:
        content = (root / path).read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        notes.append(f"{path}: {error.strerror or error}")
        return []
    return [text for part in content.split(b"\0") if (text := part.decode("utf-8", "replace").strip())]
