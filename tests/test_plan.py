"""The plan: headroom, the largest context, and that feasibility is monotonic."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from tests.planning import GIB, llama_8b, method, plan_settings
from tidekv_cli.memory_model import MemoryModel
from tidekv_cli.plan import Planner


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is simulated once serves every test of this file."""
    return tmp_path_factory.mktemp("plans")


@pytest.mark.slow
def test_feasibility_is_monotonic(plans: Path) -> None:
    draw = random.Random(0)
    for _ in range(200):
        case = plan_settings(
            llama_8b(),
            method=method(draw.choice(["tide", "tide", "oneshot"])),
            budget_tokens=draw.choice([1024, 4096]),
            free_bytes=draw.randrange(17 * GIB, 64 * GIB),
        )
        planner = Planner(case, plans)
        most = planner.largest_prompt
        assert most is not None and most > 0
        assert planner.fits(most) and not planner.fits(most + 1)
        more = Planner(replace(case, free_bytes=(case.free_bytes or 0) + GIB), plans).largest_prompt
        assert more is not None and more >= most
        less = Planner(replace(case, budget_tokens=256), plans).largest_prompt
        assert less is not None and less >= most
        lengths = sorted(draw.choice([4000, 9000, 18_000, 19_000, draw.randrange(20_000, 200_000)]) for _ in range(4))
        assert all(a <= b for a, b in pairwise(planner.bytes(length).peak for length in lengths))


@pytest.mark.slow
def test_more_budget_never_takes_less(plans: Path) -> None:
    for schedule in ("tide", "oneshot"):
        case = plan_settings(llama_8b(), method=method(schedule))
        for length in (2000, 40_000):
            budgets = (32, 256, 1999, 2000, 2001, None)
            peaks = [Planner(replace(case, budget_tokens=b), plans).bytes(length).peak for b in budgets]
            assert peaks == sorted(peaks)
            if length == 2000:
                assert len(set(peaks[3:])) == 1  # K = S and above are the same


@pytest.mark.parametrize("free", [15.2, 15.25, 15.5, 16.0])
def test_short_of_the_lines_each_length_counts(plans: Path, free: float) -> None:
    case = plan_settings(llama_8b(), chunk_size=512, score_block=256, budget_tokens=256, free_bytes=int(free * GIB))
    planner = Planner(case, plans)
    most = planner.largest_prompt
    assert most is not None and most > 0
    assert planner.plan(most).fits and planner.fits(most)
    assert not planner.fits(most + 1) and not planner.plan(most * 101 // 100 + 1).fits


@pytest.mark.slow
@pytest.mark.parametrize("length", [700, 1256])
def test_eager_attention_is_searched_as_closely(plans: Path, length: int) -> None:
    case = plan_settings(llama_8b(), attention="eager", device_kind="cpu", chunk_size=64, budget_tokens=64)
    limit = replace(case, free_bytes=Planner(case, plans).bytes(length).peak)
    assert length <= (Planner(limit, plans).largest_prompt or 0) <= length * 102 // 100


def test_eager_attention_and_no_window(plans: Path) -> None:
    config = {key: value for key, value in llama_8b().items() if key != "max_position_embeddings"}
    case = plan_settings(config, attention="eager", device_kind="cpu", free_bytes=16 * GIB, budget_tokens=64)
    assert 0 < (Planner(case, plans).largest_prompt or 0) < 100_000


@pytest.mark.parametrize("schedule", ["tide", "oneshot"])
def test_the_whole_prompt_as_budget_takes_no_less(plans: Path, schedule: str) -> None:
    case = plan_settings(llama_8b(), method=method(schedule), chunk_size=64, score_block=256)
    models = [MemoryModel(replace(case, budget_tokens=budget), plans) for budget in (2400, 2499, 2500, None)]
    peaks = [sum(model.simulated(2500).values()) for model in models]
    assert peaks == sorted(peaks) and peaks[-1] == peaks[-2]


def test_planning_is_quick_once_cached(plans: Path) -> None:
    """Under a second of CPU time, whatever is free then."""

    def plan(length: int, mib: int) -> float:
        case = plan_settings(llama_8b(), free_bytes=17 * GIB + (mib << 20), max_new_tokens=256)
        began = time.process_time()
        assert Planner(case, plans).plan(length).fits
        return time.process_time() - began

    plan(60_000, 0)
    assert max(plan(60_001, 5), plan(61_000, 900), plan(59_000, 4000)) < 1


def test_the_largest_context_counts_new_tokens(plans: Path) -> None:
    plan = Planner(plan_settings(llama_8b(), free_bytes=17 * GIB, max_new_tokens=100), plans).plan(1000)
    assert plan.memory_prompt_tokens is not None
    assert plan.max_context_tokens == plan.memory_prompt_tokens + 100
    roomy = Planner(plan_settings(llama_8b(), free_bytes=1 << 40, max_new_tokens=100), plans).plan(1000)
    assert roomy.max_context_tokens == 131072
    assert (roomy.memory_context_tokens or 0) > 131072
    none = Planner(plan_settings(llama_8b(), free_bytes=GIB), plans).plan(1000)
    assert none.max_context_tokens == 0 and not none.fits


def test_unknown_memory_never_refuses(plans: Path) -> None:
    plan = Planner(plan_settings(llama_8b(), free_bytes=None), plans).plan(10_000)
    assert plan.fits and plan.headroom_bytes is None and plan.max_context_tokens == 131072


def test_reserve_counts(plans: Path) -> None:
    case = plan_settings(llama_8b())
    bare = Planner(case, plans).plan(50_000)
    kept = Planner(replace(case, reserve_items={"context": 100, "allocator": 11}), plans).plan(50_000)
    assert kept.bytes.reserve == 111 and kept.bytes.peak == bare.bytes.peak + 111


def test_no_budget_is_a_budget_of_everything(plans: Path) -> None:
    plan = Planner(plan_settings(llama_8b(), budget_tokens=None), plans).plan(30_000)
    assert plan.cache_bytes == 32 * 30_001 * 4096
