"""The CPU as a device: what the control groups say, below what psutil says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.machines import FREE, MEBIBYTE, TOTAL, failing, group, machine, write
from tidekv_cli.device import Device, detect_device, detect_devices
from tidekv_cli.machine import psutil_memory

NO_LIMIT_V1 = 0x7FFFFFFFFFFFF000
CLAMPED = "total, since no more can be free"


def memory_of(root: Path) -> tuple[int | None, int | None]:
    device = detect_device("cpu", machine(root))
    return device.total_bytes, device.free_bytes


@pytest.mark.parametrize("request_", ["auto", "cpu"])
def test_no_control_group(tmp_path: Path, request_: str) -> None:
    assert detect_device(request_, machine(tmp_path)) == Device(
        name="CPU",
        kind="cpu",
        total_bytes=TOTAL,
        free_bytes=FREE,
        unified=False,
        sources={"total": "psutil total", "free": "psutil available"},
    )


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (
            "processor : 0\nmodel name\t: Imaginary 9000 @ 3 GHz: fast\nmodel name\t: other",
            "Imaginary 9000 @ 3 GHz: fast",
        ),
        ("Model Name : Board", "Board"),
        ("processor : 0\nBogoMIPS : 50", "CPU"),
        ("model name", "CPU"),
        ("", "CPU"),
    ],
)
def test_the_name(tmp_path: Path, content: str, name: str) -> None:
    assert detect_device("cpu", machine(write(tmp_path, proc__cpuinfo=content))).name == name


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    root = group(tmp_path, "caf\udce9", 3 * MEBIBYTE, MEBIBYTE)
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_bytes(b"0::/caf\xe9\n")
    (root / "proc/cpuinfo").write_bytes(b"model name : \xe9 chip\n")
    assert memory_of(root) == (3 * MEBIBYTE, 2 * MEBIBYTE)
    assert detect_device("cpu", machine(root)).name == "\ufffd chip"


def test_version_2(tmp_path: Path) -> None:
    root = group(write(tmp_path, proc__self__cgroup="0::/box"), "box", 4000 * MEBIBYTE, 1000 * MEBIBYTE)
    device = detect_device("cpu", machine(root))
    assert (device.total_bytes, device.free_bytes) == (4000 * MEBIBYTE, 3000 * MEBIBYTE)
    assert device.sources == {"total": "cgroup limit", "free": "cgroup limit less usage"}


def test_version_2_as_a_container_sees_it(tmp_path: Path) -> None:
    root = group(write(tmp_path, proc__self__cgroup="0::/"), "", 4000 * MEBIBYTE, 1000 * MEBIBYTE)
    assert memory_of(root) == (4000 * MEBIBYTE, 3000 * MEBIBYTE)


def test_version_1(tmp_path: Path) -> None:
    groups = "12:pids:/box\n5:cpu,cpuacct:/other\n4:memory:/box\n1:name=systemd:/box"
    root = group(write(tmp_path, proc__self__cgroup=groups), "box", 4000 * MEBIBYTE, 500 * MEBIBYTE, version=1)
    group(root, "other", 1 * MEBIBYTE, 0, version=1)
    assert memory_of(root) == (4000 * MEBIBYTE, 3500 * MEBIBYTE)


def test_version_1_with_several_controllers_in_one_line(tmp_path: Path) -> None:
    root = write(tmp_path, proc__self__cgroup="4:cpu,memory:/a:b")  # a colon may be in the name
    assert memory_of(group(root, "a:b", 4000 * MEBIBYTE, 0, version=1)) == (4000 * MEBIBYTE, 4000 * MEBIBYTE)


def test_version_1_without_a_limit(tmp_path: Path) -> None:
    root = write(tmp_path, proc__self__cgroup="4:memory:/")
    assert memory_of(group(root, "", NO_LIMIT_V1, 500 * MEBIBYTE, version=1)) == (TOTAL, FREE)


def test_both_versions_at_once(tmp_path: Path) -> None:
    root = write(tmp_path, proc__self__cgroup="4:memory:/one\n0::/two")
    group(root, "one", 4000 * MEBIBYTE, 3900 * MEBIBYTE, version=1)
    group(root, "two", 3000 * MEBIBYTE, 1000 * MEBIBYTE)
    assert memory_of(root) == (3000 * MEBIBYTE, 100 * MEBIBYTE)


def test_no_limit_in_words(tmp_path: Path) -> None:
    root = group(write(tmp_path, proc__self__cgroup="0::/box"), "box", "max", 1000 * MEBIBYTE)
    assert memory_of(root) == (TOTAL, FREE)


def test_the_least_limit_of_nested_groups(tmp_path: Path) -> None:
    root = write(tmp_path, proc__self__cgroup="0::/slice/box/inner")
    group(root, "slice/box/inner", "max", 100 * MEBIBYTE)
    group(root, "slice/box", 5000 * MEBIBYTE, 200 * MEBIBYTE)
    group(root, "slice", 3000 * MEBIBYTE, 2500 * MEBIBYTE)
    assert memory_of(root) == (3000 * MEBIBYTE, 500 * MEBIBYTE)


def test_the_least_left_may_be_of_another_group_than_the_least_limit(tmp_path: Path) -> None:
    root = write(tmp_path, proc__self__cgroup="0::/slice/box")
    group(root, "slice/box", 2000 * MEBIBYTE, 100 * MEBIBYTE)
    group(root, "slice", 4000 * MEBIBYTE, 3900 * MEBIBYTE)
    assert memory_of(root) == (2000 * MEBIBYTE, 100 * MEBIBYTE)


def test_a_group_of_a_sibling_does_not_count(tmp_path: Path) -> None:
    root = group(write(tmp_path, proc__self__cgroup="0::/box"), "boxes", MEBIBYTE, 0)
    assert memory_of(root) == (TOTAL, FREE)


def test_files_above_the_mount_do_not_count(tmp_path: Path) -> None:
    root = write(tmp_path, proc__self__cgroup="0::/../other")
    write(root, sys__fs__memory_dot_max=1, memory_dot_max=1)
    assert memory_of(root) == (TOTAL, FREE)


def test_a_limit_above_what_is_there(tmp_path: Path) -> None:
    root = group(write(tmp_path, proc__self__cgroup="0::/box"), "box", 2 * TOTAL, MEBIBYTE)
    device = detect_device("cpu", machine(root))
    assert (device.total_bytes, device.free_bytes) == (TOTAL, FREE)
    assert device.sources == {"total": "psutil total", "free": "psutil available"}


def test_a_limit_that_leaves_more_than_is_free(tmp_path: Path) -> None:
    root = group(write(tmp_path, proc__self__cgroup="0::/box"), "box", 7000 * MEBIBYTE, 0)
    device = detect_device("cpu", machine(root))
    assert (device.total_bytes, device.free_bytes) == (7000 * MEBIBYTE, FREE)
    assert device.sources == {"total": "cgroup limit", "free": "psutil available"}


def test_usage_above_the_limit(tmp_path: Path) -> None:
    root = group(write(tmp_path, proc__self__cgroup="0::/box"), "box", 100 * MEBIBYTE, 101 * MEBIBYTE)
    assert memory_of(root) == (100 * MEBIBYTE, 0)


def test_usage_that_cannot_be_read(tmp_path: Path) -> None:
    root = group(write(tmp_path, proc__self__cgroup="0::/box"), "box", 4000 * MEBIBYTE)
    assert memory_of(root) == (4000 * MEBIBYTE, 4000 * MEBIBYTE)


@pytest.mark.parametrize("content", ["", "many", "12 13", "1e9"])
def test_a_limit_that_is_no_number(tmp_path: Path, content: str) -> None:
    root = group(write(tmp_path, proc__self__cgroup="0::/box"), "box", content, 0)
    assert memory_of(root) == (TOTAL, FREE)


def test_directories_where_files_should_be(tmp_path: Path) -> None:
    root = write(tmp_path, proc__self__cgroup="0::/box")
    (root / "sys/fs/cgroup/box/memory.max").mkdir(parents=True)
    (root / "proc/cpuinfo").mkdir()
    assert memory_of(root) == (TOTAL, FREE)
    other = tmp_path / "other"
    (other / "proc/self/cgroup").mkdir(parents=True)
    assert memory_of(other) == (TOTAL, FREE)


def test_an_empty_list_of_groups(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("")
    assert memory_of(tmp_path) == (TOTAL, FREE)


def test_psutil_that_fails(tmp_path: Path) -> None:
    root = write(tmp_path, proc__meminfo="MemTotal: 2048 kB\nMemAvailable: 1024 kB\nMemFree: 512 kB")
    found = detect_devices(machine(root, memory=failing(OSError("no /proc/stat"))))
    device = found.devices[-1]
    assert (device.total_bytes, device.free_bytes) == (2 * MEBIBYTE, MEBIBYTE)
    assert device.sources == {"total": "proc/meminfo MemTotal", "free": "proc/meminfo MemAvailable"}
    assert "psutil: no /proc/stat" in found.notes


def test_a_limit_says_nothing_of_memory_that_cannot_be_read(tmp_path: Path) -> None:
    root = group(write(tmp_path, proc__self__cgroup="0::/box"), "box", 3 * MEBIBYTE, MEBIBYTE)
    device = detect_device("cpu", machine(root, memory=failing(OSError("no"))))
    assert (device.total_bytes, device.free_bytes, device.sources) == (None, None, {})


def test_more_available_than_there_is(tmp_path: Path) -> None:
    device = detect_device("cpu", machine(tmp_path, memory=lambda: (100, 200)))
    assert (device.total_bytes, device.free_bytes) == (100, 100)
    assert device.sources["free"] == CLAMPED


def test_this_machine() -> None:
    device = detect_device("cpu")
    assert device.name and device.total_bytes and device.free_bytes is not None
    assert 0 <= device.free_bytes <= device.total_bytes <= psutil_memory()[0]
