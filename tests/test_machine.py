"""What a machine lets detection see: CUDA_VISIBLE_DEVICES, and what torch says of its cards."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.machines import machine, write
from tidekv_cli.machine import Machine, reason_of, torch_cards


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        (None, None),
        ("", ()),
        ("-1", ()),
        ("0", ("0",)),
        ("1, 0", ("1", "0")),
        ("2,-1,0", ("2",)),
        ("GPU-8932f937,,1", ("GPU-8932f937",)),
        ("MIG-GPU-1/2/0", ("MIG-GPU-1/2/0",)),
    ],
)
def test_visible_devices(text: str | None, entries: tuple[str, ...] | None) -> None:
    environ = {} if text is None else {"CUDA_VISIBLE_DEVICES": text}
    assert Machine(environ=environ).visible_devices == entries


def test_what_torch_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    modern = {"name": "Orin", "major": 8, "minor": 7, "total_memory": 5, "is_integrated": 1, "uuid": Path("a-b")}
    old = {"name": "L4", "major": 8, "minor": 9, "total_memory": 6}

    def init() -> None:
        warnings.warn("this card is too old", stacklevel=1)

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(**(modern, old)[index]))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (100 + index, 200))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, second = torch_cards()
    assert (first.name, first.capability, first.uuid, first.integrated) == ("Orin", "8.7", "a-b", True)
    assert (second.index, second.total_bytes, second.uuid, second.integrated) == (1, 6, None, None)
    assert (first.free(), second.free()) == (100, 101)


def test_a_torch_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    with pytest.raises(RuntimeError, match="built without CUDA"):
        torch_cards()


@pytest.mark.parametrize(
    ("error", "reason"), [(OSError("one\ntwo"), "one"), (OSError(), "OSError"), (ValueError(" \n "), "ValueError")]
)
def test_the_reason_is_one_line(error: Exception, reason: str) -> None:
    assert reason_of(error) == reason


def test_what_exists(tmp_path: Path) -> None:
    subject = machine(write(tmp_path, dev__nvidiactl=""))
    assert subject.exists("dev/nvidiactl") and not subject.exists("dev/nvidia0")
