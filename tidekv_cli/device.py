"""What devices there are, how much memory each has, and how each figure was read. No torch until it is worth it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tidekv_cli.cgroup import read_cgroup
from tidekv_cli.errors import DeviceError, UsageError
from tidekv_cli.jtop import describe_jtop
from tidekv_cli.machine import THIS_MACHINE, CudaCard, Machine, reason_of
from tidekv_cli.nvml import NvmlCard, NvmlReading, read_nvml
from tidekv_cli.tegra import Tegra, read_meminfo, read_tegra

_MEMINFO = ("proc/meminfo MemTotal", "proc/meminfo MemAvailable")
_CLAMPED = "total, since no more can be free"
_NODES = ("dev/nvidiactl", "dev/nvidia0", "dev/dxg")  # the last is WSL's


@dataclass(frozen=True, slots=True)
class Device:
    """`total_bytes` and `free_bytes` are None where they cannot be read; `sources` names the source of each.

    `kind` is cpu, cuda or jetson; `unified` means that the GPU's memory is the machine's. `index` is CUDA's, `uuid`
    NVML's form of it, `capability` like 8.7, `board` the device-tree's model, and `reserved_bytes` what NVML says
    that driver and firmware keep (it is not part of `free_bytes`).
    """

    name: str
    kind: str
    total_bytes: int | None
    free_bytes: int | None
    unified: bool
    sources: Mapping[str, str]
    index: int | None = None
    uuid: str | None = None
    capability: str | None = None
    board: str | None = None
    reserved_bytes: int | None = None

    @property
    def address(self) -> str:
        """What `--device` and torch call it: `cpu`, `cuda:0`."""
        return "cpu" if self.index is None else f"cuda:{self.index}"


@dataclass(frozen=True, slots=True)
class Detection:
    """The CUDA devices in CUDA's order, then the CPU; `notes` say what failed, `extras` are for people only.

    `unusable` says what GPU is there, and why, where torch can use none.
    """

    devices: tuple[Device, ...]
    notes: tuple[str, ...]
    extras: Mapping[str, str]
    unusable: str | None = None


def detect_devices(machine: Machine = THIS_MACHINE, ask_jtop: bool = True) -> Detection:
    """All devices. Raises nothing: a probe that fails leaves a note. With `ask_jtop` for its extras, in a second."""
    notes: list[str] = []
    extras: dict[str, str] = {}
    tegra = read_tegra(machine.root, notes)
    cuda, unusable = _cuda(machine, tegra, notes, extras)
    if tegra.soc:
        extras["SoC"] = tegra.soc
    if tegra.sign and ask_jtop:
        try:
            shown, missing = describe_jtop(machine.jtop())
            extras.update(shown)
            notes.extend(missing)
        except Exception as error:
            notes.append(f"jtop: {reason_of(error)}")
    return Detection((*cuda, _cpu(machine, notes)), tuple(notes), extras, unusable)


def detect_device(request: str, machine: Machine = THIS_MACHINE) -> Device:
    """The device that `--device REQUEST` means: `auto` is the first CUDA device, else the CPU.

    Raises `UsageError` for what is no device's name, and `DeviceError` for a device that is not there.
    """
    match = re.fullmatch(r"cuda(?::(\d{1,3}))?", request, re.ASCII)
    if request not in ("auto", "cpu") and match is None:
        raise UsageError(f"--device {request} is not known", "use auto, cpu or cuda[:N]")
    if request == "cpu":
        return _cpu(machine, [])
    notes: list[str] = []
    cuda, _ = _cuda(machine, read_tegra(machine.root, notes), notes, {})
    if match is None:
        return cuda[0] if cuda else _cpu(machine, notes)
    wanted = int(match[1] or 0)
    for device in cuda:
        if device.index == wanted:
            return device
    there = ", ".join(f"{device.address} ({device.name})" for device in (*cuda, _cpu(machine, [])))
    why = "" if cuda or not notes else f" ({'; '.join(notes)})"
    raise DeviceError(f"device cuda:{wanted} is not there{why}: there is {there}", "use --device auto, or one of these")


def _cpu(machine: Machine, notes: list[str]) -> Device:
    total: int | None
    available: int | None
    try:
        (total, available), names = machine.memory(), ("psutil total", "psutil available")
    except Exception as error:
        notes.append(f"psutil: {reason_of(error)}")
        memory = read_meminfo(machine.root)
        total, available, names = memory.total_bytes, memory.available_bytes, _MEMINFO
    group = read_cgroup(machine.root)
    sources: dict[str, str] = {}
    total = _least(sources, "total", (total, names[0]), (group.limit_bytes, "cgroup limit"))
    left = (group.left_bytes, "cgroup limit less usage")
    free = _least(sources, "free", (available, names[1]), left, (total, _CLAMPED))
    return Device(_cpu_name(machine.root), "cpu", total, free, False, sources)


def _cpu_name(root: Path) -> str:
    try:
        for line in (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.lower().startswith("model name"):
                return line.split(":", 1)[1].strip()
    except (OSError, IndexError):
        pass
    return "CPU"


def _cuda(
    machine: Machine, tegra: Tegra, notes: list[str], extras: dict[str, str]
) -> tuple[tuple[Device, ...], str | None]:
    """CUDA's devices, and what is there that torch cannot use; `extras` gains the driver's version."""
    if not tegra.sign and not any(machine.exists(node) for node in _NODES):
        notes.append("no sign of an NVIDIA device, so torch was not asked for one")
        return (), None
    if machine.visible_devices == ():
        notes.append(f"CUDA_VISIBLE_DEVICES={machine.environ['CUDA_VISIBLE_DEVICES']!r} hides every CUDA device")
        return (), None
    reason = "torch sees no CUDA device"
    try:
        cards = tuple(machine.cuda())
    except Exception as error:
        cards, reason = (), f"torch: {reason_of(error)}"
    if not cards:
        notes.append(reason)
    nvml = NvmlReading((), None, ())
    if not cards or not all(_is_unified(card, tegra) for card in cards):  # NVML knows nothing of integrated memory
        nvml = read_nvml(machine.nvml)
        notes.extend(nvml.notes)
    if nvml.driver:
        extras["driver"] = nvml.driver
    unusable = None
    if not cards:
        notes.extend(f"torch cannot use {card.name}, which NVML sees" for card in nvml.cards)
        seen = [card.name for card in nvml.cards] or [name for name in (tegra.board,) if name]
        unusable = f"{', '.join(seen)} cannot be used ({reason})" if seen else None
    return tuple(
        _integrated(card, machine, tegra, notes)
        if _is_unified(card, tegra)
        else _discrete(card, _nvml_card(card, nvml, machine.visible_devices, notes), tegra, notes)
        for card in cards
    ), unusable


def _is_unified(card: CudaCard, tegra: Tegra) -> bool:
    return tegra.sign is not None if card.integrated is None else card.integrated


def _unified_source(card: CudaCard, tegra: Tegra) -> str:
    return "torch is_integrated" if card.integrated is not None else tegra.sign or "no sign of a Tegra"


def _integrated(card: CudaCard, machine: Machine, tegra: Tegra, notes: list[str]) -> Device:
    """Its memory is the machine's: `mem_get_info` would leave out what the kernel gives back when asked."""
    memory, group = read_meminfo(machine.root), read_cgroup(machine.root)
    available, source = memory.available_bytes, _MEMINFO[1]
    if available is None:
        notes.append("proc/meminfo gives no MemAvailable")
        try:
            available, source = machine.memory()[1], "psutil available"
        except Exception as error:
            notes.append(f"psutil: {reason_of(error)}")
    sources = {"unified": _unified_source(card, tegra), "capability": "torch"}
    own, limit = (card.total_bytes, "torch total_memory"), (group.limit_bytes, "cgroup limit")
    total = _least(sources, "total", own, (memory.total_bytes, _MEMINFO[0]), limit)
    left = (group.left_bytes, "cgroup limit less usage")
    free = _least(sources, "free", (available, source), left, (total, _CLAMPED))
    return Device(
        name=card.name,
        kind="jetson" if tegra.sign else "cuda",
        total_bytes=total,
        free_bytes=free,
        unified=True,
        sources=sources,
        index=card.index,
        uuid=_uuid(card),
        capability=card.capability,
        board=tegra.board,
    )


def _discrete(card: CudaCard, found: NvmlCard | None, tegra: Tegra, notes: list[str]) -> Device:
    """Its memory is its own, whatever limits the process: NVML, else torch."""
    sources = {"unified": _unified_source(card, tegra), "capability": "torch"}
    total, sources["total"] = card.total_bytes, "torch total_memory"
    free: int | None = None
    free_source = ""
    if found is not None:
        free, free_source = found.free_bytes, found.source
        if found.total_bytes is not None:
            total, sources["total"] = found.total_bytes, found.source
        if found.reserved_bytes is not None:
            sources["reserved"] = found.source
    if free is None:
        try:
            free, free_source = card.free(), "torch mem_get_info"
        except Exception as error:
            notes.append(f"free memory of cuda:{card.index}: {reason_of(error)}")
    return Device(
        name=card.name or (found.name if found else ""),
        kind="cuda",
        total_bytes=total,
        free_bytes=_least(sources, "free", (free, free_source), (total, _CLAMPED)),
        unified=False,
        sources=sources,
        index=card.index,
        uuid=found.uuid if found else _uuid(card),
        capability=card.capability,
        reserved_bytes=found.reserved_bytes if found else None,
    )


def _uuid(card: CudaCard) -> str | None:
    return None if card.uuid is None else f"GPU-{card.uuid}"


def _nvml_card(card: CudaCard, nvml: NvmlReading, visible: tuple[str, ...] | None, notes: list[str]) -> NvmlCard | None:
    """The card or slice that CUDA calls `card.index`: never by its place, since NVML's order is not CUDA's."""
    asked = visible[card.index] if visible and card.index < len(visible) else ""
    names = [asked] if asked.startswith("MIG-") else []
    if card.uuid is not None:
        names += [f"GPU-{card.uuid}", f"MIG-{card.uuid}"]
    elif asked.startswith("GPU-"):
        names.append(asked)
    for name in names:
        found = nvml.find(name)
        if found is not None and found.partitioned:
            found = nvml.only_slice(found.uuid)
            if found is None:
                notes.append(f"cuda:{card.index} is a slice of a card, and NVML cannot tell which")
                return None
        if found is not None:
            return found
    return None


def _least(
    sources: dict[str, str], figure: str, read: tuple[int | None, str], *limits: tuple[int | None, str]
) -> int | None:
    """What was read, or the least of its limits; its source goes to `sources`. None if it was not read."""
    if read[0] is None:
        return None
    known = [(value, source) for value, source in (read, *limits) if value is not None]
    value, sources[figure] = min(known, key=lambda pair: pair[0])
    return value
