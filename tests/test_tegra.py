"""Device-tree and meminfo of made-up boards."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.machines import agx_orin_64, jetson, write
from tidekv_cli.tegra import Meminfo, Tegra, read_meminfo, read_tegra


def test_agx_orin(tmp_path: Path) -> None:
    notes: list[str] = []
    root = agx_orin_64(tmp_path)
    sign = "proc/device-tree/compatible"
    assert read_tegra(root, notes) == Tegra(sign, "NVIDIA Jetson AGX Orin Developer Kit", "tegra234")
    assert read_meminfo(root) == Meminfo(64349184 * 1024, 52428800 * 1024)
    assert notes == []


def test_thor(tmp_path: Path) -> None:
    root = jetson(tmp_path, "NVIDIA Jetson AGX Thor Developer Kit", "tegra264", 125772, 120000)
    assert read_tegra(root, []).soc == "tegra264"


def test_another_board_is_no_tegra(tmp_path: Path) -> None:
    tree = tmp_path / "proc/device-tree"
    tree.mkdir(parents=True)
    (tree / "compatible").write_bytes(b"raspberrypi,5-model-b\0brcm,bcm2712\0")
    (tree / "model").write_bytes(b"Raspberry Pi 5\0")
    assert read_tegra(tmp_path, []) == Tegra(None, None, None)


def test_no_device_tree(tmp_path: Path) -> None:
    notes: list[str] = []
    assert read_tegra(tmp_path, notes) == Tegra(None, None, None) and notes == []


@pytest.mark.parametrize("node", ["nvhost-gpu", "nvgpu"])
def test_a_container_that_hides_the_device_tree(tmp_path: Path, node: str) -> None:
    write(tmp_path, **{f"dev__{node}": ""})
    assert read_tegra(tmp_path, []) == Tegra(f"dev/{node}", None, None)


def test_a_property_that_cannot_be_read(tmp_path: Path) -> None:
    root = agx_orin_64(tmp_path)
    (root / "proc/device-tree/model").unlink()
    (root / "proc/device-tree/model").mkdir()
    notes: list[str] = []
    assert read_tegra(root, notes) == Tegra("proc/device-tree/compatible", None, "tegra234")
    assert len(notes) == 1 and "proc/device-tree/model" in notes[0]


@pytest.mark.parametrize("content", [b"", b"\0", b"\0\0"])
def test_an_empty_model(tmp_path: Path, content: bytes) -> None:
    root = agx_orin_64(tmp_path)
    (root / "proc/device-tree/model").write_bytes(content)
    assert read_tegra(root, []).board is None


@pytest.mark.parametrize(
    ("content", "total", "available"),
    [
        ("MemTotal: 8 kB\nMemFree: 1 kB\nMemAvailable: 4 kB", 8192, 4096),
        ("MemTotal: 8 kB\nMemFree: 1 kB\nSwapFree: 9 kB", 8192, None),  # kernels before 3.14
        ("MemTotal:\nMemAvailable: many kB", None, None),
        ("MemTotal: 8 MB\nMemAvailable: -4 kB", None, None),
        ("MemTotal: ² kB\nMemAvailable 4 kB", None, None),
        ("", None, None),
    ],
)
def test_meminfo(tmp_path: Path, content: str, total: int | None, available: int | None) -> None:
    assert read_meminfo(write(tmp_path, proc__meminfo=content)) == Meminfo(total, available)


def test_no_meminfo(tmp_path: Path) -> None:
    assert read_meminfo(tmp_path) == Meminfo(None, None)
    (tmp_path / "proc/meminfo").mkdir(parents=True)
    assert read_meminfo(tmp_path) == Meminfo(None, None)
