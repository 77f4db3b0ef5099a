"""Cards by UUID from a made-up NVML, and every way in which a real one fails."""

from __future__ import annotations

import pynvml
import pytest

from tests.machines import MEBIBYTE, NOT_AVAILABLE, FakeCard, FakeNvml, failing
from tidekv_cli.nvml import NvmlCard, NvmlReading, read_nvml

CODES = {
    1: "Uninitialized",
    3: "Not Supported",
    4: "Insufficient Permissions",
    6: "Not Found",
    9: "Driver Not Loaded",
    12: "NVML Shared Library Not Found",
    13: "Function Not Found",
    15: "GPU is lost",
    18: "RM has detected an NVML/RM version mismatch.",
    999: "Unknown Error",
}
FIRST, SECOND = FakeCard("GPU-1", total=100, free=60, used=30, reserved=10), FakeCard("GPU-2", name="NVIDIA L4")


def read(nvml: FakeNvml) -> NvmlReading:
    reading = read_nvml(lambda: nvml)
    assert nvml.open_sessions == 0  # every session that was started is ended
    return reading


def test_two_cards() -> None:
    reading = read(FakeNvml((FIRST, SECOND)))
    assert reading.driver == "580.95.05" and reading.notes == ()
    assert reading.cards[0] == NvmlCard("GPU-1", "NVIDIA H200", 100, 60, 30, 10, "NVML memory v2")
    assert [card.name for card in reading.cards] == ["NVIDIA H200", "NVIDIA L4"]


def test_bytes_for_text() -> None:
    reading = read(FakeNvml((FakeCard("GPU-1", name=b"NVIDIA \xff L4"),), driver=b"470.1"))
    assert reading.cards[0].name == "NVIDIA \ufffd L4" and reading.driver == "470.1"


def test_version_1_where_version_2_is_not_known() -> None:
    reading = read(FakeNvml((FIRST,), errors={"nvmlDeviceGetMemoryInfo_v2": 13}))
    assert reading.cards == (NvmlCard("GPU-1", "NVIDIA H200", 100, 60, 40, None, "NVML memory v1"),)
    assert reading.notes == ()


def test_version_1_where_the_module_is_too_old_for_version_2() -> None:
    nvml = FakeNvml((FIRST,))
    old = {name: getattr(nvml, name) for name in dir(nvml) if name.startswith(("nvmlD", "nvmlS"))}
    module = type("Old", (), {"nvmlInit": staticmethod(nvml.nvmlInit), **{k: staticmethod(v) for k, v in old.items()}})
    assert not hasattr(module, "nvmlMemory_v2")
    assert read_nvml(lambda: module).cards[0].source == "NVML memory v1"


@pytest.mark.parametrize("figure", ["total", "free", "used", "reserved"])
def test_what_is_not_available_is_none_and_not_0(figure: str) -> None:
    figures = {"total": 100, "free": 60, "used": 30, "reserved": 10, figure: NOT_AVAILABLE}
    card = read(FakeNvml((FakeCard("GPU-1", **figures),))).cards[0]
    known = {"total": 100, "free": 60, "used": 30, "reserved": 10, figure: None}
    assert {key: getattr(card, f"{key}_bytes") for key in known} == known


@pytest.mark.parametrize("code", CODES)
def test_failing_at_the_start(code: int) -> None:
    reading = read(FakeNvml((FIRST,), errors={"nvmlInit": code}))
    note = f"NVML cannot be started: {CODES[code]} (NVML error {code})"
    assert reading == NvmlReading((), None, (note,))


@pytest.mark.parametrize("code", CODES)
def test_failing_at_the_count(code: int) -> None:
    reading = read(FakeNvml((FIRST,), errors={"nvmlDeviceGetCount": code}))
    assert reading.cards == () and reading.driver == "580.95.05"
    assert reading.notes == (f"NVML count of devices: {CODES[code]} (NVML error {code})",)


@pytest.mark.parametrize("code", CODES)
def test_failing_at_one_handle(code: int) -> None:
    reading = read(FakeNvml((FIRST, SECOND), errors={"nvmlDeviceGetHandleByIndex GPU-1": code}))
    assert [card.uuid for card in reading.cards] == ["GPU-2"]
    assert reading.notes == (f"NVML device 0: {CODES[code]} (NVML error {code})",)


@pytest.mark.parametrize("code", CODES)
def test_failing_at_one_memory(code: int) -> None:
    reading = read(FakeNvml((FIRST, SECOND), errors={"nvmlDeviceGetMemoryInfo GPU-1": code}))
    assert [(card.uuid, card.total_bytes is None, card.free_bytes is None) for card in reading.cards] == [
        ("GPU-1", True, True),
        ("GPU-2", False, False),
    ]
    assert reading.notes == (f"NVML memory of NVIDIA H200: {CODES[code]} (NVML error {code})",)


@pytest.mark.parametrize(
    ("function", "what"),
    [("nvmlDeviceGetUUID", "UUID"), ("nvmlDeviceGetName", "name"), ("nvmlSystemGetDriverVersion", "driver version")],
)
def test_failing_elsewhere(function: str, what: str) -> None:
    reading = read(FakeNvml((FIRST,), errors={function: 15}))
    assert len(reading.notes) == 1 and what in reading.notes[0] and "GPU is lost" in reading.notes[0]
    assert len(reading.cards) == (0 if what == "UUID" else 1)


def test_failing_at_the_end_loses_nothing() -> None:
    reading = read(FakeNvml((FIRST,), errors={"nvmlShutdown": 1}))
    assert [card.uuid for card in reading.cards] == ["GPU-1"]


def test_no_module() -> None:
    reading = read_nvml(failing(ModuleNotFoundError("No module named 'pynvml'")))
    assert reading.notes == ("NVML cannot be started: No module named 'pynvml'",)


@pytest.mark.parametrize(("code", "notes"), [(3, 0), (13, 0), (15, 1)])
def test_a_card_without_slices(code: int, notes: int) -> None:
    reading = read(FakeNvml((FIRST,), errors={"nvmlDeviceGetMigMode": code}))
    assert not reading.cards[0].partitioned and len(reading.notes) == notes


def sliced(*slices: FakeCard | None) -> FakeNvml:
    return FakeNvml((FakeCard("GPU-1", slices=slices), SECOND))


def test_slices_and_empty_slots() -> None:
    part = FakeCard("MIG-1", name="NVIDIA H200 MIG 1g.18gb", total=18 * MEBIBYTE, free=17 * MEBIBYTE)
    reading = read(sliced(None, part, None))
    assert reading.notes == ()
    assert [(card.uuid, card.partitioned, card.parent) for card in reading.cards] == [
        ("GPU-1", True, None),
        ("MIG-1", False, "GPU-1"),
        ("GPU-2", False, None),
    ]
    assert reading.cards[1].total_bytes == 18 * MEBIBYTE
    assert reading.only_slice("GPU-1") == reading.cards[1]
    assert reading.only_slice("GPU-2") is None


def test_the_only_slice_is_not_one_of_two() -> None:
    assert read(sliced(FakeCard("MIG-1"), FakeCard("MIG-2"))).only_slice("GPU-1") is None


def test_slices_that_cannot_be_read() -> None:
    nvml = sliced(FakeCard("MIG-1"))
    nvml.errors = {"nvmlDeviceGetMigDeviceHandleByIndex": 4}
    reading = read(nvml)
    assert [card.uuid for card in reading.cards] == ["GPU-1", "GPU-2"]
    assert reading.notes == ("NVML device 0 slice 0: Insufficient Permissions (NVML error 4)",)


def test_a_shortened_uuid_must_be_of_one_card() -> None:
    reading = read(FakeNvml((FakeCard("GPU-12"), FakeCard("GPU-123"), FakeCard("GPU-45"))))
    found = {uuid: reading.find(uuid) for uuid in ("GPU-4", "GPU-12", "GPU-1", "GPU-6")}
    assert {uuid: card and card.uuid for uuid, card in found.items()} == {
        "GPU-4": "GPU-45",
        "GPU-12": "GPU-12",
        "GPU-1": None,
        "GPU-6": None,
    }


def test_the_fake_has_what_the_real_module_has() -> None:
    names = [name for name in dir(FakeNvml) if name.startswith("nvml")]
    assert len(names) > 10
    assert all(hasattr(pynvml, name) for name in names)


@pytest.mark.parametrize(
    "function", [name for name in dir(FakeNvml) if name.startswith("nvml") and name != "nvmlShutdown"]
)
def test_a_module_that_lacks_a_function(function: str) -> None:
    """Of another version, or a stub: whatever is not there leaves a note or nothing."""

    class Lacking(FakeNvml):
        def __getattribute__(self, name: str) -> object:
            if name == function:
                raise AttributeError(name)
            return super().__getattribute__(name)

    nvml = Lacking((FakeCard("GPU-1"), FakeCard("GPU-2")))
    assert isinstance(read_nvml(lambda: nvml).notes, tuple)
