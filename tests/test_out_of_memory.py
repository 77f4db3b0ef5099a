"""Memory that runs out in the middle: a smaller chunk or score block, or a clean end, and the next prompt is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tidekv_cli.engine.attention import FlashCPU
from tidekv_cli.engine.budgets import Uniform
from tidekv_cli.engine.memory import attempt, release_unused
from tidekv_cli.engine.prefill import Prefilled, PrefillSettings
from tidekv_cli.engine.selectors.snapkv import SnapKV
from tidekv_cli.engine.session import Session

LENGTH, BUDGET = 900, 100
SAYINGS = [
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory"),
    RuntimeError("NVML_SUCCESS == r INTERNAL ASSERT FAILED at CUDACachingAllocator.cpp:1131"),
    RuntimeError("!handles_.at(i) INTERNAL ASSERT FAILED"),
    RuntimeError("CUDA driver error: device not ready"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
]


class FailAt(TorchDispatchMode):
    """Raises `error` in place of the operation of that number, views not counted; `count` is how many there were."""

    def __init__(self, number: int, error: Exception) -> None:
        super().__init__()
        self._number, self._error = number, error
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.count += 1
            if self.count == self._number:
                raise self._error
        return func(*args, **(kwargs or {}))


def settings(schedule: str, chunk: int = 512, block: int = 512) -> PrefillSettings:
    return PrefillSettings(schedule, SnapKV(), Uniform(BUDGET), FlashCPU(), chunk, block, 4)


def prompt_ids() -> list[int]:
    return torch.randint(0, 128, (LENGTH,), generator=torch.Generator().manual_seed(3)).tolist()


def same(found: Prefilled, expected: Prefilled) -> bool:
    def close(a: Tensor, b: Tensor) -> bool:
        return bool((a - b).abs().max() <= 1e-4 * b.abs().max())

    kept = all(torch.equal(a, b) for a, b in zip(found.kept, expected.kept, strict=True))
    stores = zip(found.cache, expected.cache, strict=True)
    rows = all(close(a.keys, b.keys) and close(a.values, b.values) for a, b in stores)
    return kept and rows and close(found.logits, expected.logits)


def fail_everywhere(model: Any, schedule: str, numbers: range) -> dict[str, int]:
    """Fail at each of the operations `numbers` in turn; how it ended, and how often something was lowered."""
    session, ids, ended, lowered = Session(model, frozenset()), prompt_ids(), {"answer": 0, "error": 0}, 0
    expected, _ = session.prefill(ids, settings(schedule))
    for number in numbers:
        failing = FailAt(number, SAYINGS[number % len(SAYINGS)])
        try:
            with failing:
                found, _ = session.prefill(ids, settings(schedule))
        except (MemoryError, RuntimeError):
            ended["error"] += 1
        else:
            assert same(found, expected), number
            ended["answer"] += 1
            if failing.count < number:
                break
            lowered += bool(found.lowered)
        again, _ = session.prefill(ids, settings(schedule))
        assert torch.equal(again.logits, expected.logits), number
        assert all(torch.equal(a, b) for a, b in zip(again.kept, expected.kept, strict=True)), number
    return {**ended, "lowered": lowered}


@pytest.mark.parametrize(("schedule", "offset"), [("tide", 0), ("oneshot", 5)])
def test_memory_that_runs_out_anywhere(tiny_model: Callable[..., Any], schedule: str, offset: int) -> None:
    ended = fail_everywhere(tiny_model(num_hidden_layers=3), schedule, range(1 + offset, 3000, 61))
    if schedule == "tide":  # one failure is always made good
        assert ended["answer"] > 10 and ended["error"] == 0 and ended["lowered"] > 3
    else:
        assert ended["answer"] > 1 and ended["error"] > 1


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["tide", "oneshot"])
def test_memory_that_runs_out_everywhere(tiny_model: Callable[..., Any], schedule: str) -> None:
    ended = fail_everywhere(tiny_model(num_hidden_layers=3), schedule, range(1, 5000, 5))
    if schedule == "tide":
        assert ended["answer"] > 100 and ended["error"] <= 3 and ended["lowered"] > 20
    else:
        assert ended["answer"] > 10


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
