"""Devices of made-up machines: what is found, how much is free, and what a failed probe leaves behind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
import pytest

from tests.machines import (
    FREE,
    MEBIBYTE,
    NOT_AVAILABLE,
    TOTAL,
    UUIDS,
    FakeCard,
    FakeNvml,
    agx_orin_64,
    card,
    failing,
    group,
    jetson,
    machine,
    never,
    orin,
    with_cards,
    write,
)
from tidekv_cli.device import Detection, Device, detect_device, detect_devices
from tidekv_cli.errors import DeviceError, ExitCode, UsageError
from tidekv_cli.jtop import JtopError
from tidekv_cli.machine import CudaCard, Machine

NVML_CODES = (1, 3, 4, 6, 9, 12, 13, 15, 18, 999)
CLAMPED = "total, since no more can be free"
DISCRETE = [
    ("NVIDIA A100-PCIE-40GB", 40960, "8.0"),
    ("NVIDIA A100-SXM4-40GB", 40960, "8.0"),
    ("NVIDIA A100 80GB PCIe", 81920, "8.0"),
    ("NVIDIA A100-SXM4-80GB", 81920, "8.0"),
    ("A100-SXM-80GB", 81252, "8.0"),
    ("NVIDIA GeForce RTX 4090", 24564, "8.9"),
    ("NVIDIA GeForce RTX 3090", 24576, "8.6"),
    ("NVIDIA L4", 23034, "8.9"),
    ("NVIDIA H100 80GB HBM3", 81559, "9.0"),
    ("NVIDIA H200", 143771, "9.0"),
    ("NVIDIA GeForce RTX 4060 Laptop GPU", 8188, "8.9"),
]
JETSONS = [  # model in the device-tree, SoC, MiB, torch's name, capability
    ("NVIDIA Jetson AGX Orin Developer Kit", "tegra234", 62841, "Orin", "8.7"),
    ("NVIDIA Jetson AGX Orin Developer Kit", "tegra234", 62817, "Orin", "8.7"),
    ("Jetson AGX Orin", "tegra234", 62841, "Orin", "8.7"),
    ("NVIDIA Jetson AGX Orin Developer Kit", "tegra234", 30536, "Orin", "8.7"),
    ("NVIDIA Jetson Orin NX Engineering Reference Developer Kit", "tegra234", 15656, "Orin", "8.7"),
    ("NVIDIA Jetson Orin NX Engineering Reference Developer Kit", "tegra234", 7577, "Orin", "8.7"),
    ("NVIDIA Orin Nano Developer Kit", "tegra234", 7620, "Orin", "8.7"),
    ("NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super", "tegra234", 7620, "Orin", "8.7"),
    ("NVIDIA Jetson AGX Thor Developer Kit", "tegra264", 125772, "NVIDIA Thor", "11.0"),
]


@pytest.mark.parametrize(("name", "mebibytes", "capability"), DISCRETE)
def test_discrete_cards(tmp_path: Path, name: str, mebibytes: int, capability: str) -> None:
    memory = {"total": mebibytes * MEBIBYTE, "free": (mebibytes - 700) * MEBIBYTE, "reserved": 300 * MEBIBYTE}
    nvml = FakeNvml((FakeCard(f"GPU-{UUIDS[0]}", name=name, **memory),))
    seen_by_cuda = card(name=name, mebibytes=mebibytes - 400, capability=capability)
    found = detect_devices(with_cards(tmp_path, seen_by_cuda, nvml=nvml))
    assert found.devices[0] == Device(
        name=name,
        kind="cuda",
        total_bytes=mebibytes * MEBIBYTE,
        free_bytes=(mebibytes - 700) * MEBIBYTE,
        unified=False,
        sources={
            "unified": "torch is_integrated",
            "capability": "torch",
            "total": "NVML memory v2",
            "free": "NVML memory v2",
            "reserved": "NVML memory v2",
        },
        index=0,
        uuid=f"GPU-{UUIDS[0]}",
        capability=capability,
        reserved_bytes=300 * MEBIBYTE,
    )
    assert [device.kind for device in found.devices] == ["cuda", "cpu"]
    assert found.notes == () and found.extras == {"driver": "580.95.05"}


@pytest.mark.parametrize(("model", "soc", "mebibytes", "name", "capability"), JETSONS)
def test_jetsons(tmp_path: Path, model: str, soc: str, mebibytes: int, name: str, capability: str) -> None:
    root = jetson(tmp_path, model, soc, mebibytes, mebibytes - 2000)
    cards = [orin(mebibytes, name, capability)]
    device = detect_device("auto", machine(root, cuda=lambda: cards))
    assert device == Device(
        name=name,
        kind="jetson",
        total_bytes=mebibytes * MEBIBYTE,
        free_bytes=(mebibytes - 2000) * MEBIBYTE,
        unified=True,
        sources={
            "unified": "torch is_integrated",
            "capability": "torch",
            "total": "torch total_memory",
            "free": "proc/meminfo MemAvailable",
        },
        index=0,
        uuid=f"GPU-{UUIDS[0]}",
        capability=capability,
        board=model,
    )
    assert device.address == "cuda:0"


def agx(tmp_path: Path, *cards: CudaCard, **probes: Any) -> Machine:
    """An AGX Orin 64 GB; its CUDA card alone unless others are given. jtop is absent."""
    probes = {"jtop": failing(JtopError("absent")), **probes}
    return machine(agx_orin_64(tmp_path), cuda=lambda: cards or (orin(),), **probes)


def test_a_real_dump_and_jtop(tmp_path: Path) -> None:
    answer = {"hardware": {"Module": "AGX", "L4T": "36.4.4", "Jetpack": ""}, "RAM": {"tot": 1, "used": 9, "free": 1}}
    found = detect_devices(agx(tmp_path, jtop=lambda: answer))
    gpu = found.devices[0]
    assert (gpu.total_bytes, gpu.free_bytes) == (62841 * MEBIBYTE, 51200 * MEBIBYTE)  # not MemFree, not jtop
    assert found.extras["SoC"] == "tegra234" and found.extras["jtop L4T"] == "36.4.4"
    assert found.notes == ("jtop JetPack: not given", "jtop power mode: not given")


@pytest.mark.parametrize("error", [JtopError("no answer within 3 s"), OSError("no fork"), KeyError("RAM")])
def test_jtop_that_fails_costs_a_note_only(tmp_path: Path, error: Exception) -> None:
    found = detect_devices(agx(tmp_path, jtop=failing(error)))
    assert found.notes == (f"jtop: {error}",) and [d.kind for d in found.devices] == ["jetson", "cpu"]


def test_jtop_is_not_asked_for_one_device_or_elsewhere(tmp_path: Path) -> None:
    assert detect_device("auto", agx(tmp_path / "agx", jtop=never)).kind == "jetson"
    detect_devices(machine(tmp_path / "pc"))


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_on_a_jetson(tmp_path: Path, version: int) -> None:
    line = "0::/box" if version == 2 else "4:memory:/box"
    root = group(write(tmp_path, proc__self__cgroup=line), "box", 8000 * MEBIBYTE, 3000 * MEBIBYTE, version)
    device = detect_device("cuda", agx(root))
    assert (device.total_bytes, device.free_bytes) == (8000 * MEBIBYTE, 5000 * MEBIBYTE)
    assert (device.sources["total"], device.sources["free"]) == ("cgroup limit", "cgroup limit less usage")


def test_a_container_that_hides_the_device_tree(tmp_path: Path) -> None:
    root = write(tmp_path, **{"dev__nvhost-gpu": "", "proc__meminfo": "MemTotal: 2048 kB\nMemAvailable: 1024 kB"})
    device = detect_device("auto", machine(root, cuda=lambda: [orin(integrated=None)]))
    assert (device.kind, device.unified, device.board, device.free_bytes) == ("jetson", True, None, MEBIBYTE)
    assert device.sources["unified"] == "dev/nvhost-gpu"


def test_what_cuda_has_bounds_what_is_available(tmp_path: Path) -> None:
    device = detect_device("auto", agx(tmp_path, orin(4000)))
    assert device.total_bytes == device.free_bytes == 4000 * MEBIBYTE
    assert device.sources["free"] == CLAMPED


def test_what_the_kernel_has_bounds_what_cuda_has(tmp_path: Path) -> None:
    device = detect_device("auto", agx(tmp_path, orin(99999)))
    assert device.total_bytes == 62841 * MEBIBYTE and device.sources["total"] == "proc/meminfo MemTotal"


@pytest.mark.parametrize(
    ("memory", "free", "source"),
    [(lambda: (TOTAL, FREE), FREE, "psutil available"), (failing(OSError("no")), None, None)],
)
def test_a_jetson_without_mem_available(
    tmp_path: Path, memory: Callable[[], Any], free: int | None, source: str | None
) -> None:
    subject = agx(tmp_path, memory=memory)
    write(tmp_path, proc__meminfo="MemTotal: 64349184 kB\nMemFree: 3145728 kB\nSwapFree: 32174080 kB")
    found = detect_devices(subject)
    device = found.devices[0]
    assert device.free_bytes == free and device.sources.get("free") == source
    assert "proc/meminfo gives no MemAvailable" in found.notes


@pytest.mark.parametrize(("on_tegra", "kind"), [(True, "jetson"), (False, "cuda")])
def test_an_old_torch_that_does_not_say_integrated(tmp_path: Path, on_tegra: bool, kind: str) -> None:
    if on_tegra:
        subject = agx(tmp_path, orin(integrated=None))
    else:
        subject = with_cards(tmp_path, card(integrated=None, free=lambda: 5), nvml=FakeNvml())
    device = detect_device("auto", subject)
    assert (device.kind, device.unified) == (kind, on_tegra)
    assert device.sources["unified"] == ("proc/device-tree/compatible" if on_tegra else "no sign of a Tegra")


def test_a_discrete_card_in_a_tegra_machine_is_not_unified(tmp_path: Path) -> None:
    nvml = FakeNvml((FakeCard(f"GPU-{UUIDS[1]}", total=49140 * MEBIBYTE, free=48000 * MEBIBYTE),))
    other = card(1, "NVIDIA RTX 6000 Ada Generation", "8.9", 49140, uuid=UUIDS[1])
    found = detect_devices(agx(tmp_path, orin(), other, nvml=lambda: nvml))
    assert [(d.kind, d.unified, d.address) for d in found.devices] == [
        ("jetson", True, "cuda:0"),
        ("cuda", False, "cuda:1"),
        ("cpu", False, "cpu"),
    ]
    assert found.devices[1].free_bytes == 48000 * MEBIBYTE and found.devices[1].board is None


def test_an_integrated_card_that_is_no_tegra(tmp_path: Path) -> None:
    root = write(tmp_path, proc__meminfo="MemTotal: 2048 kB\nMemAvailable: 1024 kB\nMemFree: 2 kB")
    device = detect_device("auto", with_cards(root, orin(122000, "NVIDIA GB10", "12.1")))
    assert (device.kind, device.unified, device.free_bytes) == ("cuda", True, MEBIBYTE)


@pytest.mark.parametrize("version", [1, 2])
def test_a_discrete_card_in_a_container_keeps_its_memory(tmp_path: Path, version: int) -> None:
    line = "0::/box" if version == 2 else "4:memory:/box"
    root = group(write(tmp_path, proc__self__cgroup=line), "box", 4000 * MEBIBYTE, 3000 * MEBIBYTE, version)
    found = detect_devices(with_cards(root, card(), nvml=FakeNvml((FakeCard(f"GPU-{UUIDS[0]}"),))))
    gpu, cpu = found.devices
    assert (gpu.total_bytes, gpu.free_bytes) == (143771 * MEBIBYTE, 140000 * MEBIBYTE)
    assert (cpu.total_bytes, cpu.free_bytes) == (4000 * MEBIBYTE, 1000 * MEBIBYTE)


def two_cards() -> tuple[tuple[CudaCard, CudaCard], FakeNvml]:
    """CUDA lists the faster card first, NVML the slower one."""
    fast, slow = card(0, "fast", uuid=UUIDS[0]), card(1, "slow", mebibytes=8188, uuid=UUIDS[1])
    return (fast, slow), FakeNvml(
        (
            FakeCard(f"GPU-{UUIDS[1]}", "slow", total=8188 * MEBIBYTE, free=8000 * MEBIBYTE),
            FakeCard(f"GPU-{UUIDS[0]}", "fast"),
        )
    )


def test_the_order_of_nvml_is_not_that_of_cuda(tmp_path: Path) -> None:
    cards, nvml = two_cards()
    found = detect_devices(with_cards(tmp_path, *cards, nvml=nvml))
    assert [(d.name, d.address, d.free_bytes) for d in found.devices[:2]] == [
        ("fast", "cuda:0", 140000 * MEBIBYTE),
        ("slow", "cuda:1", 8000 * MEBIBYTE),
    ]


@pytest.mark.parametrize("visible", ["1", "GPU-22222222", f"GPU-{UUIDS[1]}", " 1 , -1, 0"])
def test_one_visible_card_of_two(tmp_path: Path, visible: str) -> None:
    _, nvml = two_cards()
    only = card(0, "slow", mebibytes=8188, uuid=UUIDS[1])
    subject = with_cards(tmp_path, only, nvml=nvml, environ={"CUDA_VISIBLE_DEVICES": visible})
    device = detect_device("cuda:0", subject)
    assert (device.uuid, device.free_bytes) == (f"GPU-{UUIDS[1]}", 8000 * MEBIBYTE)


def test_a_torch_without_uuid_is_helped_by_the_variable(tmp_path: Path) -> None:
    _, nvml = two_cards()
    only = card(0, "slow", uuid=None, free=lambda: 123 * MEBIBYTE)
    named = with_cards(tmp_path, only, nvml=nvml, environ={"CUDA_VISIBLE_DEVICES": "GPU-2222"})
    assert detect_device("cuda", named).free_bytes == 8000 * MEBIBYTE
    by_index = with_cards(tmp_path, only, nvml=nvml, environ={"CUDA_VISIBLE_DEVICES": "0"})
    device = detect_device("cuda", by_index)  # 0 is CUDA's, which NVML does not know
    assert (device.free_bytes, device.sources["free"]) == (123 * MEBIBYTE, "torch mem_get_info")
    assert device.uuid is None


@pytest.mark.parametrize("visible", ["", " ", "-1", "-1,0", ",0"])
def test_no_visible_card(tmp_path: Path, visible: str) -> None:
    root = write(tmp_path, dev__nvidiactl="")
    subject = machine(root, environ={"CUDA_VISIBLE_DEVICES": visible})
    found = detect_devices(subject)
    assert [device.kind for device in found.devices] == ["cpu"]
    assert found.notes == (f"CUDA_VISIBLE_DEVICES={visible!r} hides every CUDA device",)
    with pytest.raises(DeviceError, match="CUDA_VISIBLE_DEVICES"):
        detect_device("cuda", subject)


def partitioned(*slices: str) -> FakeNvml:
    parts = [FakeCard(f"MIG-{uuid}", "slice", 18000 * MEBIBYTE, 17000 * MEBIBYTE, 9, 5) for uuid in slices]
    return FakeNvml((FakeCard(f"GPU-{UUIDS[0]}", slices=[None, *parts]),))


@pytest.mark.parametrize(
    ("uuid", "visible"),
    [
        (UUIDS[0], "MIG-b"),  # CUDA before 12: the card's UUID
        ("b", None),
        ("b", "MIG-b"),
        (None, "MIG-b"),
    ],
)
def test_a_slice_is_found(tmp_path: Path, uuid: str | None, visible: str | None) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    subject = with_cards(tmp_path, card(mebibytes=17900, uuid=uuid), nvml=partitioned("a", "b"), environ=environ)
    device = detect_device("cuda", subject)
    assert (device.uuid, device.total_bytes, device.free_bytes) == ("MIG-b", 18000 * MEBIBYTE, 17000 * MEBIBYTE)


def test_the_only_slice(tmp_path: Path) -> None:
    assert detect_device("cuda", with_cards(tmp_path, card(), nvml=partitioned("a"))).uuid == "MIG-a"


def test_one_of_two_slices_never_gets_the_whole_card(tmp_path: Path) -> None:
    part = card(mebibytes=17900, free=lambda: 16000 * MEBIBYTE)
    found = detect_devices(with_cards(tmp_path, part, nvml=partitioned("a", "b")))
    device = found.devices[0]
    assert (device.total_bytes, device.free_bytes) == (17900 * MEBIBYTE, 16000 * MEBIBYTE)
    assert device.sources["free"] == "torch mem_get_info"
    assert found.notes == ("cuda:0 is a slice of a card, and NVML cannot tell which",)


@pytest.mark.parametrize("code", NVML_CODES)
@pytest.mark.parametrize(
    "function", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetMemoryInfo"]
)
def test_nvml_that_fails_costs_a_note_only(tmp_path: Path, function: str, code: int) -> None:
    nvml = FakeNvml((FakeCard(f"GPU-{UUIDS[0]}"),), errors={function: code})
    found = detect_devices(with_cards(tmp_path, card(mebibytes=100, free=lambda: 60 * MEBIBYTE), nvml=nvml))
    gpu = found.devices[0]
    assert (gpu.total_bytes, gpu.free_bytes, gpu.reserved_bytes) == (100 * MEBIBYTE, 60 * MEBIBYTE, None)
    assert (gpu.sources["total"], gpu.sources["free"]) == ("torch total_memory", "torch mem_get_info")
    assert gpu.uuid == f"GPU-{UUIDS[0]}"
    assert len(found.notes) == 1 and str(pynvml.NVMLError(code)) in found.notes[0] and str(code) in found.notes[0]


def test_no_nvml_and_no_mem_get_info(tmp_path: Path) -> None:
    nvml, free = failing(ImportError("No module named 'pynvml'")), failing(RuntimeError("CUDA error\nmore"))
    found = detect_devices(with_cards(tmp_path, card(free=free), nvml=nvml))
    assert found.devices[0].free_bytes is None and "free" not in found.devices[0].sources
    assert found.notes == (
        "NVML cannot be started: No module named 'pynvml'",
        "free memory of cuda:0: CUDA error",
    )


def test_one_card_that_nvml_cannot_read(tmp_path: Path) -> None:
    (fast, _), nvml = two_cards()
    nvml.errors = {f"nvmlDeviceGetMemoryInfo GPU-{UUIDS[1]}": 15}
    slow = card(1, "slow", uuid=UUIDS[1], free=lambda: 7 * MEBIBYTE)
    found = detect_devices(with_cards(tmp_path, fast, slow, nvml=nvml))
    assert [device.free_bytes for device in found.devices[:2]] == [140000 * MEBIBYTE, 7 * MEBIBYTE]
    assert found.notes == ("NVML memory of slow: GPU is lost (NVML error 15)",)


def test_wsl_without_figures(tmp_path: Path) -> None:
    lost = FakeCard(f"GPU-{UUIDS[0]}", total=NOT_AVAILABLE, free=NOT_AVAILABLE, reserved=NOT_AVAILABLE)
    cards = [card(mebibytes=8188, free=lambda: 7000 * MEBIBYTE)]
    subject = machine(write(tmp_path, dev__dxg=""), cuda=lambda: cards, nvml=lambda: FakeNvml((lost,)))
    device = detect_device("auto", subject)
    assert (device.total_bytes, device.free_bytes, device.reserved_bytes) == (8188 * MEBIBYTE, 7000 * MEBIBYTE, None)
    assert "reserved" not in device.sources


def test_more_free_than_there_is(tmp_path: Path) -> None:
    nvml = FakeNvml((FakeCard(f"GPU-{UUIDS[0]}", total=100, free=120),))
    device = detect_device("auto", with_cards(tmp_path, card(), nvml=nvml))
    assert (device.total_bytes, device.free_bytes, device.sources["free"]) == (100, 100, CLAMPED)
    other = detect_device("auto", with_cards(tmp_path, card(mebibytes=1, free=lambda: TOTAL), nvml=FakeNvml()))
    assert (other.free_bytes, other.sources["free"]) == (MEBIBYTE, CLAMPED)


def test_a_name_that_only_nvml_knows(tmp_path: Path) -> None:
    nvml = FakeNvml((FakeCard(f"GPU-{UUIDS[0]}", name=b"NVIDIA L4"),))
    assert detect_device("auto", with_cards(tmp_path, card(name=""), nvml=nvml)).name == "NVIDIA L4"


@pytest.mark.parametrize(
    ("cuda", "note"),
    [
        (lambda: (), "torch sees no CUDA device"),
        (failing(RuntimeError("this torch is built without CUDA")), "torch: this torch is built without CUDA"),
        (failing(ImportError("libcudart.so.12: cannot open\nmore")), "torch: libcudart.so.12: cannot open"),
        (failing(OSError()), "torch: OSError"),
    ],
)
def test_torch_that_cannot_use_cuda(tmp_path: Path, cuda: Callable[[], Any], note: str) -> None:
    root = write(tmp_path, dev__nvidiactl="")
    subject = machine(root, cuda=cuda, nvml=lambda: FakeNvml((FakeCard("GPU-1"),)))
    assert detect_devices(subject) == Detection(
        devices=(detect_device("cpu", subject),),
        notes=(note, "torch cannot use NVIDIA H200, which NVML sees"),
        extras={"driver": "580.95.05"},
        unusable=f"NVIDIA H200 cannot be used ({note})",
    )
    assert detect_device("auto", subject).kind == "cpu"


@pytest.mark.parametrize("node", ["nvidiactl", "nvidia0", "nvhost-gpu", "nvgpu", "dxg"])
def test_signs_of_an_nvidia_device(tmp_path: Path, node: str) -> None:
    asked: list[str] = []
    root = write(tmp_path, **{f"dev__{node}": ""})
    detect_devices(machine(root, cuda=lambda: asked.append(node) or (), nvml=FakeNvml, jtop=dict))
    assert asked == [node]


def test_no_sign_of_one(tmp_path: Path) -> None:
    write(tmp_path, dev__null="", dev__dri__card0="")
    assert detect_devices(machine(tmp_path)).notes == ("no sign of an NVIDIA device, so torch was not asked for one",)


def test_the_cpu_asks_for_nothing_else(tmp_path: Path) -> None:
    assert detect_device("cpu", machine(agx_orin_64(tmp_path))).kind == "cpu"


def test_requests_for_cards(tmp_path: Path) -> None:
    cards, nvml = two_cards()
    subject = with_cards(tmp_path, *cards, nvml=nvml)
    names = {request: detect_device(request, subject).name for request in ("auto", "cuda", "cuda:0", "cuda:1", "cpu")}
    assert names == {"auto": "fast", "cuda": "fast", "cuda:0": "fast", "cuda:1": "slow", "cpu": "CPU"}
    with pytest.raises(DeviceError) as caught:
        detect_device("cuda:2", subject)
    assert caught.value.code == ExitCode.DEVICE
    assert caught.value.message == "device cuda:2 is not there: there is cuda:0 (fast), cuda:1 (slow), cpu (CPU)"


@pytest.mark.parametrize(("request_", "address"), [("cuda", "cuda:0"), ("cuda:0", "cuda:0"), ("cuda:7", "cuda:7")])
def test_a_card_that_is_not_there(tmp_path: Path, request_: str, address: str) -> None:
    with pytest.raises(DeviceError, match=f"device {address} is not there") as caught:
        detect_device(request_, machine(tmp_path))
    assert "no sign of an NVIDIA device" in caught.value.message and "cpu (CPU)" in caught.value.message
    assert caught.value.code == ExitCode.DEVICE and "auto" in caught.value.hint


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
        "cuda:٣",
        "cuda:",
        "cuda:9999",
        "mps",
        " cpu",
    ],
)
def test_nonsense_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="not known") as caught:
        detect_device(name, machine(tmp_path))
    assert name.strip() in caught.value.message and "cuda[:N]" in caught.value.hint


def test_nothing_heavy_is_imported() -> None:
    program = (
        "import sys, pathlib\nimport tidekv_cli.device as d\nfrom tidekv_cli.machine import Machine\n"
        "d.detect_devices(Machine(root=pathlib.Path('/nonexistent')))\n"
        "assert not {'torch', 'pynvml', 'jtop', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
