"""Where a request is carried out: cards that work and that do not, allocator settings, attention that is tried."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.machines import UUIDS, FakeCard, FakeNvml, agx_orin_64, card, machine, orin, with_cards
from tests.planning import llama_8b
from tidekv_cli.errors import DeviceError, MemoryExhaustedError, UsageError
from tidekv_cli.machine import set_torch_allocator, torch_attention_fault, torch_fault
from tidekv_cli.model_spec import spec_from_config
from tidekv_cli.request import RunRequest
from tidekv_cli.setup import Setup, set_up

SPEC = spec_from_config(llama_8b(), "test")
SetUp = Callable[..., Setup]


PROBES = ("cuda_fault", "attention_fault", "set_allocator")


@pytest.fixture
def on_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SetUp:
    """`set_up` on a machine with one RTX 4090; keywords are flags, or the machine's probes."""

    def do(compute: bool = True, **given: Any) -> Setup:
        name = "NVIDIA GeForce RTX 4090"
        nvml = FakeNvml([FakeCard(f"GPU-{UUIDS[0]}", name, total=24564 << 20, free=24000 << 20)])
        probes = {key: given.pop(key) for key in PROBES if key in given}
        there = with_cards(tmp_path, card(0, name, "8.9", 24200), nvml=nvml, **probes)
        monkeypatch.setattr("tidekv_cli.machine.THIS_MACHINE", there)
        return set_up(RunRequest(**given), {}, {}, compute)

    return do


def test_a_card_that_works_is_used(on_a_card: SetUp) -> None:
    setup = on_a_card()
    assert (setup.device.kind, setup.profile.name, setup.choice.dtype) == ("cuda", "rtx-4090", "bfloat16")
    assert setup.warnings == () and setup.attention(SPEC).name == "flash-attn"


def test_a_card_that_does_not_work(on_a_card: SetUp) -> None:
    def fault(index: int) -> str:
        assert index == 0
        return "no kernel image is available for execution on the device"

    setup = on_a_card(cuda_fault=fault)
    assert setup.device.kind == "cpu" and setup.profile.name == "cpu"
    (warning,) = setup.warnings
    assert "RTX 4090" in warning and "no kernel image" in warning
    for wanted in ("cuda", "cuda:0"):
        with pytest.raises(DeviceError, match="no kernel image"):
            on_a_card(cuda_fault=fault, device=wanted)
    assert on_a_card(cuda_fault=fault, device="cpu").warnings == ()
    assert on_a_card(compute=False, cuda_fault=fault).device.kind == "cuda", "figures only"


def test_auto_takes_the_first_card_that_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [card(n, f"NVIDIA {name}", "8.9", 24200, uuid=UUIDS[n]) for n, name in enumerate(("old", "new"))]
    nvml = FakeNvml([FakeCard(f"GPU-{UUIDS[n]}", one.name, free=24000 << 20) for n, one in enumerate(cards)])
    there = with_cards(tmp_path, *cards, nvml=nvml, cuda_fault=lambda index: "no kernel image" if index == 0 else None)
    monkeypatch.setattr("tidekv_cli.machine.THIS_MACHINE", there)
    setup = set_up(RunRequest(), {}, {})
    assert setup.device.address == "cuda:1"
    assert setup.warnings == ("cuda:0, NVIDIA old, cannot be used (no kernel image), so cuda:1 is",)


def test_a_card_that_torch_cannot_use_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_cuda() -> Any:
        raise RuntimeError("this torch is built without CUDA")

    pc = with_cards(tmp_path / "pc", nvml=FakeNvml([FakeCard(f"GPU-{UUIDS[0]}")]), cuda=no_cuda)
    jetson = machine(agx_orin_64(tmp_path / "jetson"), cuda=no_cuda, nvml=lambda: FakeNvml())
    for there, name in ((pc, "NVIDIA H200"), (jetson, "NVIDIA Jetson AGX Orin")):
        monkeypatch.setattr("tidekv_cli.machine.THIS_MACHINE", there)
        setup = set_up(RunRequest(), {}, {})
        assert setup.device.address == "cpu"
        (warning,) = setup.warnings
        assert name in warning and "built without CUDA" in warning and warning.endswith("so cpu is")
        assert set_up(RunRequest(device="cpu"), {}, {}).warnings == ()
        hidden = set_up(RunRequest(), {}, {"CUDA_VISIBLE_DEVICES": ""})
        assert hidden.warnings == (), "asked for"


def test_figures_of_a_card_that_does_not_work(on_a_card: SetUp) -> None:
    def never(*_: Any) -> str:
        raise AssertionError

    setup = on_a_card(compute=False, cuda_fault=lambda index: "no kernel image", attention_fault=never)
    assert setup.attention(SPEC).name == "flash-attn"


def test_a_full_card_is_no_broken_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB")

    monkeypatch.setattr("tidekv_cli.engine.backends.failure", full)
    with pytest.raises(MemoryExhaustedError, match="no memory left"):
        torch_attention_fault("sdpa", 0, "bfloat16", (4, 2, 64), False)
    monkeypatch.setattr("torch.arange", full)
    with pytest.raises(MemoryExhaustedError, match="no memory left"):
        torch_fault(0)


def test_memory_is_read_again(on_a_card: SetUp, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = on_a_card()
    before = setup.free_bytes
    assert before is not None and setup.at_present(1 << 30).free_bytes == before + (1 << 30)
    assert on_a_card(memory_limit="4GiB").at_present(1 << 30).free_bytes == 4 << 30


def test_the_allocator_is_set_for_cards_that_compute(on_a_card: SetUp) -> None:
    told: list[Any] = []
    on_a_card(set_allocator=told.append)
    assert told == [{"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}]
    on_a_card(set_allocator=told.append, compute=False)
    on_a_card(set_allocator=told.append, device="cpu")
    assert len(told) == 1


def test_allocator_settings_that_torch_refuses(on_a_card: SetUp) -> None:
    def refuse(variables: Any) -> None:
        raise ValueError("Unrecognized key 'expandable_segments' in Config")

    with pytest.raises(UsageError, match="Unrecognized key"):
        on_a_card(set_allocator=refuse)


def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr("torch.cuda.memory._set_allocator_settings", told.append)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    monkeypatch.delenv("CUDA_TIDEKV_TEST", raising=False)
    set_torch_allocator({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "CUDA_TIDEKV_TEST": "1"})
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:64" and told == []
    assert os.environ.pop("CUDA_TIDEKV_TEST") == "1"
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    set_torch_allocator({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True" == told[0]


def test_attention_is_tried_with_the_models_heads(on_a_card: SetUp) -> None:
    tried: list[Any] = []

    def fault(*arguments: Any) -> str | None:
        tried.append(arguments)
        return {"flash-attn": "No module named 'flash_attn'", "sdpa": "needs sm80"}.get(arguments[0])

    chosen = on_a_card(attention_fault=fault).attention(SPEC)
    assert tried == [(name, 0, "bfloat16", (8, 2, 128), False) for name in ("flash-attn", "sdpa", "efficient")]
    assert chosen.name == "efficient" and len(chosen.warnings) == 1 and "needs sm80" in chosen.warnings[0]


def test_what_is_not_here_cannot_be_tried(on_a_card: SetUp) -> None:
    def fault(*arguments: Any) -> str:
        raise AssertionError

    setup = on_a_card(compute=False, attention_fault=fault, profile="a100-80gb")
    assert setup.elsewhere and setup.attention(SPEC).name == "flash-attn"
    assert on_a_card(attention_fault=fault, device="cpu").attention(SPEC).name == "sdpa"


@pytest.mark.parametrize("asked", ["backend:cudaMallocAsync", "expandable_segments:True"])
def test_a_jetson_has_torchs_own_allocator_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    there = machine(agx_orin_64(tmp_path), cuda=lambda: [orin()])
    monkeypatch.setattr("tidekv_cli.machine.THIS_MACHINE", there)
    setup = set_up(RunRequest(), {}, {"PYTORCH_CUDA_ALLOC_CONF": asked})
    assert setup.device.kind == "jetson" and setup.profile.allocator == {}
    assert len(setup.warnings) == 1 and "Jetson" in setup.warnings[0]
    assert set_up(RunRequest(), {}, {}).warnings == ()


def test_no_card_is_used_before_it_is_known_to_work() -> None:
    if not torch.cuda.is_available():
        assert torch_fault(0) is not None
    else:
        assert torch_fault(0) is None
