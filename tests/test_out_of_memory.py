"""Memory that runs out in the middle: a smaller chunk or score block, or a clean end, and the next prompt is right."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.planning import uniform
from tidekv_cli.engine.flash_cpu import FlashCPU
from tidekv_cli.engine.memory import attempt, release_unused
from tidekv_cli.engine.prefill import LayerMajorPrefill, Prefilled, PrefillSettings
from tidekv_cli.engine.selectors.snapkv import SnapKV
from tidekv_cli.engine.session import Session
from tidekv_cli.errors import is_out_of_memory

LENGTH, BUDGET = 900, 100
SAYINGS = [
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory"),
    RuntimeError("NVML_SUCCESS == r INTERNAL ASSERT FAILED at CUDACachingAllocator.cpp:1131"),
    RuntimeError("!handles_.at(i) INTERNAL ASSERT FAILED"),
    RuntimeError("CUDA driver error: device not ready"),
    RuntimeError("std::bad_alloc"),
    RuntimeError("could not create a memory object"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
]


@pytest.fixture(autouse=True)
def _short_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is when they are said."""
    monkeypatch.setattr("tidekv_cli.errors.memory_is_short", lambda: True)


class FailAt(TorchDispatchMode):
    """Raises `error` in place of the operation of that number, views not counted; number 0 notes the sites of all."""

    def __init__(self, number: int, error: Exception) -> None:
        super().__init__()
        self._number, self._error = number, error
        self.count = 0
        self.sites: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.count += 1
            if self._number == 0:
                self.sites.append((func, *site()))
            elif self.count == self._number:
                raise self._error
        return func(*args, **(kwargs or {}))


def site() -> tuple[Any, ...]:
    """The layer at work, and the lines of the engine and of transformers that led here."""
    lines: list[tuple[str, int]] = []
    layer, frame = None, sys._getframe(2)
    while frame is not None and frame.f_code is not LayerMajorPrefill.run.__wrapped__.__code__:
        if "/engine/" in frame.f_code.co_filename or "/transformers/" in frame.f_code.co_filename:
            lines.append((frame.f_code.co_name, frame.f_lineno))
        frame = frame.f_back
    if frame is not None:
        layer = frame.f_locals.get("layer")
    return (layer, *lines)


def settings(schedule: str, chunk: int = 512, block: int = 512) -> PrefillSettings:
    return PrefillSettings(schedule, SnapKV(), uniform(BUDGET), FlashCPU(), chunk, block, 4)


def prompt_ids() -> list[int]:
    return torch.randint(0, 128, (LENGTH,), generator=torch.Generator().manual_seed(3)).tolist()


def same(found: Prefilled, expected: Prefilled) -> bool:
    def close(a: Tensor, b: Tensor) -> bool:
        return bool((a - b).abs().max() <= 1e-4 * b.abs().max())

    kept = all(torch.equal(a, b) for a, b in zip(found.kept, expected.kept, strict=True))
    stores = zip(found.cache, expected.cache, strict=True)
    rows = all(close(a.keys, b.keys) and close(a.values, b.values) for a, b in stores)
    return kept and rows and close(found.logits, expected.logits)


@pytest.mark.parametrize("schedule", ["tide", "oneshot"])
@pytest.mark.parametrize("step", [12, pytest.param(3, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.long)])
def test_memory_that_runs_out_at_every_site(tiny_model: Callable[..., Any], schedule: str, step: int) -> None:
    """At each site in the first, a middle and the last layer: an answer or an error, then a right answer."""
    session, ids = Session(tiny_model(num_hidden_layers=3), frozenset()), prompt_ids()[:544]  # a chunk and the window
    session.adapter.visibles()  # looked at once only
    untouched = FailAt(0, MemoryError())
    with untouched:
        expected, _ = session.prefill(ids, settings(schedule))
    first = {name: number for number, name in reversed(list(enumerate(untouched.sites, 1)))}
    assert len(first) > 150
    numbers = sorted(first.values())[::step]
    answers = lowered = 0
    for number in numbers:
        found = None
        try:
            with FailAt(number, SAYINGS[number % len(SAYINGS)]) as failing:
                found, _ = session.prefill(ids, settings(schedule))
        except (MemoryError, RuntimeError) as error:
            assert is_out_of_memory(error), number
        assert failing.count >= number
        if found is not None:
            assert same(found, expected), number
            answers += 1
            lowered += bool(found.lowered)
        again = LayerMajorPrefill(session.adapter, torch.tensor([ids]), settings(schedule)).run()
        assert torch.equal(again.logits, expected.logits), number
        assert all(torch.equal(a, b) for a, b in zip(again.kept, expected.kept, strict=True)), number
    if schedule == "tide":  # one failure is made good wherever a layer is at work
        assert answers >= len(numbers) - 3 and lowered > 20 // step
    else:
        assert 20 // step < answers < len(numbers)


def test_a_ceiling_is_met_with_a_smaller_chunk(tiny_model: Callable[..., Any]) -> None:
    session, ids = Session(tiny_model(num_hidden_layers=3, intermediate_size=512), frozenset()), prompt_ids()
    wide, most = session.prefill(ids, settings("tide"))
    narrow, least = session.prefill(ids, settings("tide", chunk=256))
    assert least < most
    found, peak = session.prefill(ids, settings("tide"), ceiling_bytes=(least + most) // 2)
    assert least <= peak <= (least + most) // 2 and same(found, wide) and same(narrow, wide)
    (lowered,) = found.lowered
    assert lowered.startswith("chunk_size 512 -> 256: ") and "bytes of live tensors are more than" in lowered
    with pytest.raises(MemoryError, match="live tensors"):
        session.prefill(ids, settings("tide"), ceiling_bytes=least - 1)
    assert same(session.prefill(ids, settings("tide"))[0], wide)


def test_a_smaller_score_block_is_tried(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model(num_attention_heads=32, num_key_value_heads=1, head_dim=2, intermediate_size=16)
    session, ids = Session(model, frozenset()), prompt_ids()
    _, most = session.prefill(ids, settings("tide", 64, 900))
    expected, least = session.prefill(ids, settings("tide", 64, 450))
    assert least < most
    found, _ = session.prefill(ids, settings("tide", 64, 900), ceiling_bytes=least)
    assert found.lowered[0].startswith("score_block 900 -> 450: ") and same(found, expected)


def test_memory_that_sinks_is_met_before_it_is_gone(tiny_model: Callable[..., Any]) -> None:
    session, ids = Session(tiny_model(num_hidden_layers=3), frozenset()), prompt_ids()
    expected, _ = session.prefill(ids, settings("tide"))
    asked: list[int] = []

    def sinking(tokens: int) -> str | None:
        asked.append(tokens)
        return "only a little is left" if len(asked) > 4 and tokens > 256 else None

    found, _ = session.prefill(ids, settings("tide"), shortage=sinking)
    assert same(found, expected) and found.lowered == ("chunk_size 512 -> 256: only a little is left",)
    assert max(asked[5:]) <= 512 and max(asked[6:]) <= 356
    with pytest.raises(MemoryError, match="nothing is left"):
        session.prefill(ids, settings("tide"), shortage=lambda tokens: "nothing is left")


def test_other_errors_are_not_taken_for_it() -> None:
    def wrong() -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes"):
        attempt(wrong)
    for error in SAYINGS:

        def fails(error: Exception = error) -> None:
            raise error

        result, said = attempt(fails)
        assert result is None and said
    assert attempt(lambda: 7) == (7, None)
    release_unused(torch.device("cpu"))
