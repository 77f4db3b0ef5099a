"""Memory of a made-up machine: what the control groups say, below what psutil says."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tidekv_cli.device import Device, detect_device
from tidekv_cli.errors import DeviceError, ExitCode, UsageError

MEGABYTE = 1 << 20
TOTAL, FREE = 8000 * MEGABYTE, 6000 * MEGABYTE
NO_LIMIT_V1 = 0x7FFFFFFFFFFFF000


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """psutil reports `TOTAL` and `FREE`."""
    memory = SimpleNamespace(total=TOTAL, available=FREE)
    monkeypatch.setattr("tidekv_cli.device.psutil.virtual_memory", lambda: memory)


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


def memory_of(root: Path) -> tuple[int | None, int | None]:
    device = detect_device("cpu", root)
    return device.total_bytes, device.free_bytes


@pytest.mark.parametrize("request_", ["auto", "cpu"])
def test_no_control_group(tmp_path: Path, request_: str) -> None:
    assert detect_device(request_, tmp_path) == Device(
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
    assert detect_device("cpu", write(tmp_path, proc__cpuinfo=content)).name == name


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    root = group(tmp_path, "caf\udce9", 3 * MEGABYTE, MEGABYTE)
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_bytes(b"0::/caf\xe9\n")
    (root / "proc/cpuinfo").write_bytes(b"model name : \xe9 chip\n")
    assert memory_of(root) == (3 * MEGABYTE, 2 * MEGABYTE)
    assert detect_device("cpu", root).name == "\ufffd chip"


def test_version_2(tmp_path: Path) -> None:
    root = group(write(tmp_path, proc__self__cgroup="0::/box"), "box", 4000 * MEGABYTE, 1000 * MEGABYTE)
    device = detect_device("cpu", root)
    assert (device.total_bytes, device.free_bytes) == (4000 * MEGABYTE, 3000 * MEGABYTE)
    assert device.sources == {"total": "cgroup limit", "free": "cgroup limit less usage"}


def test_version_2_as_a_container_sees_it(tmp_path: Path) -> None:
    root = group(write(tmp_path, proc__self__cgroup="0::/"), "", 4000 * MEGABYTE, 1000 * MEGABYTE)
    assert memory_of(root) == (4000 * MEGABYTE, 3000 * MEGABYTE)


def test_version_1(tmp_path: Path) -> None:
    groups = "12:pids:/box\n5:cpu,cpuacct:/other\n4:memory:/box\n1:name=systemd:/box"
    root = group(write(tmp_path, proc__self__cgroup=groups), "box", 4000 * MEGABYTE, 500 * MEGABYTE, version=1)
    group(root, "other", 1 * MEGABYTE, 0, version=1)
    assert memory_of(root) == (4000 * MEGABYTE, 3500 * MEGABYTE)


def test_version_1_with_several_controllers_in_one_line(tmp_path: Path) -> None:
    root = write(tmp_path, proc__self__cgroup="4:cpu,memory:/a:b")  # a colon may be in the name
    assert memory_of(group(root, "a:b", 4000 * MEGABYTE, 0, version=1)) == (4000 * MEGABYTE, 4000 * MEGABYTE)


def test_version_1_without_a_limit(tmp_path: Path) -> None:
    root = write(tmp_path, proc__self__cgroup="4:memory:/")
    assert memory_of(group(root, "", NO_LIMIT_V1, 500 * MEGABYTE, version=1)) == (TOTAL, FREE)


def test_both_versions_at_once(tmp_path: Path) -> None:
    root = write(tmp_path, proc__self__cgroup="4:memory:/one\n0::/two")
    group(root, "one", 4000 * MEGABYTE, 3900 * MEGABYTE, version=1)
    group(root, "two", 3000 * MEGABYTE, 1000 * MEGABYTE)
    assert memory_of(root) == (3000 * MEGABYTE, 100 * MEGABYTE)


def test_no_limit_in_words(tmp_path: Path) -> None:
    root = group(write(tmp_path, proc__self__cgroup="0::/box"), "box", "max", 1000 * MEGABYTE)
    assert memory_of(root) == (TOTAL, FREE)


def test_the_least_limit_of_nested_groups(tmp_path: Path) -> None:
    root = write(tmp_path, proc__self__cgroup="0::/slice/box/inner")
    group(root, "slice/box/inner", "max", 100 * MEGABYTE)
    group(root, "slice/box", 5000 * MEGABYTE, 200 * MEGABYTE)
    group(root, "slice", 3000 * MEGABYTE, 2500 * MEGABYTE)
    assert memory_of(root) == (3000 * MEGABYTE, 500 * MEGABYTE)


def test_the_least_left_may_be_of_another_group_than_the_least_limit(tmp_path: Path) -> None:
    root = write(tmp_path, proc__self__cgroup="0::/slice/box")
    group(root, "slice/box", 2000 * MEGABYTE, 100 * MEGABYTE)
    group(root, "slice", 4000 * MEGABYTE, 3900 * MEGABYTE)
    assert memory_of(root) == (2000 * MEGABYTE, 100 * MEGABYTE)


def test_a_group_of_a_sibling_does_not_count(tmp_path: Path) -> None:
    root = group(write(tmp_path, proc__self__cgroup="0::/box"), "boxes", MEGABYTE, 0)
    assert memory_of(root) == (TOTAL, FREE)


def test_files_above_the_mount_do_not_count(tmp_path: Path) -> None:
    root = write(tmp_path, proc__self__cgroup="0::/../other")
    write(root, sys__fs__memory_dot_max=1, memory_dot_max=1)
    assert memory_of(root) == (TOTAL, FREE)


def test_a_limit_above_what_is_there(tmp_path: Path) -> None:
    root = group(write(tmp_path, proc__self__cgroup="0::/box"), "box", 2 * TOTAL, MEGABYTE)
    device = detect_device("cpu", root)
    assert (device.total_bytes, device.free_bytes) == (TOTAL, FREE)
    assert device.sources == {"total": "psutil total", "free": "psutil available"}


def test_a_limit_that_leaves_more_than_is_free(tmp_path: Path) -> None:
    root = group(write(tmp_path, proc__self__cgroup="0::/box"), "box", 7000 * MEGABYTE, 0)
    device = detect_device("cpu", root)
    assert (device.total_bytes, device.free_bytes) == (7000 * MEGABYTE, FREE)
    assert device.sources == {"total": "cgroup limit", "free": "psutil available"}


def test_usage_above_the_limit(tmp_path: Path) -> None:
    root = group(write(tmp_path, proc__self__cgroup="0::/box"), "box", 100 * MEGABYTE, 101 * MEGABYTE)
    assert memory_of(root) == (100 * MEGABYTE, 0)


def test_usage_that_cannot_be_read(tmp_path: Path) -> None:
    root = group(write(tmp_path, proc__self__cgroup="0::/box"), "box", 4000 * MEGABYTE)
    assert memory_of(root) == (4000 * MEGABYTE, 4000 * MEGABYTE)


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


def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    device = detect_device("auto")
    assert device.name and device.total_bytes and device.free_bytes is not None
    assert 0 <= device.free_bytes <= device.total_bytes


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cuda:7"])
def test_cuda_is_refused(name: str) -> None:
    with pytest.raises(DeviceError, match="CPU only") as caught:
        detect_device(name)
    assert name in caught.value.message and "--device cpu" in caught.value.hint
    assert caught.value.code == ExitCode.DEVICE


@pytest.mark.parametrize(
    "name",
    [
        "",
        "gpu",
        "CPU",
        "cpu:0",
        "cuda:x",
        "cuda:-1",
        "cuda:0:1",
        "cuda0",
        "cuda:²",
        "cuda:",
        "cuda:9999",
        "mps",
        " cpu",
    ],
)
def test_nonsense_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="not known") as caught:
        detect_device(name)
    assert name.strip() in caught.value.message and "cuda[:N]" in caught.value.hint
