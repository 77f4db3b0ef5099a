"""`tidekv devices` on made-up machines and on this one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli_runner import run_cli
from tests.machines import (
    FREE,
    MEBIBYTE,
    TOTAL,
    UUIDS,
    FakeCard,
    FakeNvml,
    agx_orin_64,
    card,
    failing,
    machine,
    orin,
    with_cards,
)
from tidekv_cli.jtop import JtopError
from tidekv_cli.machine import Machine

Install = Callable[[Machine], None]
KEYS = ["name", "kind", "index", "uuid", "capability", "board", "profile"]
KEYS += ["total_bytes", "free_bytes", "reserved_bytes", "unified", "sources"]  # in this order


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Makes a machine the one that the command looks at."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return lambda machine: monkeypatch.setattr("tidekv_cli.machine.THIS_MACHINE", machine)


def test_no_driver_as_text(tmp_path: Path, install: Install) -> None:
    install(machine(tmp_path))
    done = run_cli("devices")
    assert done.code == 0
    header, row = done.out.splitlines()
    assert header.split() == ["device", "name", "kind", "profile", "total", "free", "how", "read"]
    assert row.split()[:4] == ["cpu", "CPU", "cpu", "cpu"]
    assert "7.812 GiB" in row and "5.859 GiB" in row and "total: psutil total; free: psutil available" in row
    assert done.err == "note: no sign of an NVIDIA device, so torch was not asked for one\n"


def test_no_driver_as_json(tmp_path: Path, install: Install) -> None:
    install(machine(tmp_path))
    done = run_cli("devices", "--json")
    assert done.code == 0 and done.err == ""
    assert done.document == {
        "schema": 1,
        "devices": [
            {
                "name": "CPU",
                "kind": "cpu",
                "index": None,
                "uuid": None,
                "capability": None,
                "board": None,
                "profile": "cpu",
                "total_bytes": TOTAL,
                "free_bytes": FREE,
                "reserved_bytes": None,
                "unified": False,
                "sources": {"total": "psutil total", "free": "psutil available"},
            }
        ],
        "extras": {},
        "notes": ["no sign of an NVIDIA device, so torch was not asked for one"],
    }


def test_a_card(tmp_path: Path, install: Install) -> None:
    install(with_cards(tmp_path, card(), nvml=FakeNvml((FakeCard(f"GPU-{UUIDS[0]}"),))))
    document = run_cli("devices", "--json").document
    assert [list(device) for device in document["devices"]] == [KEYS, KEYS]
    gpu = document["devices"][0]
    assert (gpu["name"], gpu["index"], gpu["uuid"]) == ("NVIDIA H200", 0, f"GPU-{UUIDS[0]}")
    assert (gpu["total_bytes"], gpu["reserved_bytes"]) == (143771 * MEBIBYTE, 771 * MEBIBYTE)
    assert document["extras"] == {"driver": "580.95.05"} and document["notes"] == []
    text = run_cli("devices").out.splitlines()
    assert [line.split()[0] for line in text[1:3]] == ["cuda:0", "cpu"]
    assert "580.95.05" in text[-1]


def test_a_jetson_without_jtop(tmp_path: Path, install: Install) -> None:
    absent = failing(JtopError("jetson-stats is not installed (optional)"))
    install(machine(agx_orin_64(tmp_path), cuda=lambda: [orin()], jtop=absent))
    done = run_cli("devices")
    assert done.code == 0 and done.err == "note: jtop: jetson-stats is not installed (optional)\n"
    assert "Orin, NVIDIA Jetson AGX Orin Developer Kit" in done.out and "tegra234" in done.out
    assert run_cli("devices", "--json").document["devices"][0]["kind"] == "jetson"


def test_torch_without_cuda(tmp_path: Path, install: Install) -> None:
    machine = with_cards(tmp_path, nvml=FakeNvml((FakeCard("GPU-1"),)))
    install(machine)
    assert run_cli("devices", "--json").document["notes"] == [
        "torch sees no CUDA device",
        "torch cannot use NVIDIA H200, which NVML sees",
    ]


def test_memory_that_cannot_be_read(tmp_path: Path, install: Install) -> None:
    install(machine(tmp_path, memory=failing(OSError("no /proc"))))
    done = run_cli("devices")
    assert done.code == 0 and "psutil: no /proc" in done.err
    assert done.out.splitlines()[1].split()[4:] == ["unknown", "unknown", "not", "at", "all"]


def test_the_variables_are_those_of_the_command_line(tmp_path: Path, install: Install) -> None:
    install(with_cards(tmp_path, card(), nvml=FakeNvml((FakeCard(f"GPU-{UUIDS[0]}"),))))
    document = run_cli("devices", "--json", environ={"CUDA_VISIBLE_DEVICES": ""}).document
    assert [device["kind"] for device in document["devices"]] == ["cpu"]
    assert document["notes"] == ["CUDA_VISIBLE_DEVICES='' hides every CUDA device"]


def test_this_machine() -> None:
    done = run_cli("devices", "--json")
    assert done.code == 0
    cpu = json.loads(done.out)["devices"][-1]
    assert cpu["kind"] == "cpu" and 0 <= cpu["free_bytes"] <= cpu["total_bytes"]
    assert run_cli("devices").code == 0


def test_wrong_usage() -> None:
    run_cli("devices", "--jsn").assert_error(2, "--jsn")
