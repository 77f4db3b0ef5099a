"""What is lowered where the profile's settings do not fit, in which order, and what is said about it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.planning import GIB, llama_8b, method, plan_settings
from tidekv_cli.fitting import Fitter, raising_flags
from tidekv_cli.methods import METHODS
from tidekv_cli.plan import Planner
from tidekv_cli.plan_settings import PlanSettings
from tidekv_cli.request import EngineChoice

LENGTH = 60_000


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is simulated once serves every test of this file."""
    return tmp_path_factory.mktemp("plans")


def fitter(plans: Path, settings: PlanSettings, budget: int | str | None = 4096, *fixed: str) -> Fitter:
    choice = EngineChoice(
        method=settings.method,
        axis_settings=settings.axis_settings,
        budget=budget,
        chunk_size=settings.chunk_size,
        score_block=settings.score_block,
        attention=(settings.attention,),
        wanted_attention=settings.attention,
        dtype=settings.dtype,
        max_new_tokens=settings.max_new_tokens,
        fixed=frozenset(fixed),
    )
    return Fitter(choice, settings.window, plans)


def with_room_for(plans: Path, **changes: Any) -> PlanSettings:
    """Settings, with a window so wide that scoring tells, whose free memory is what they take with `changes`."""
    case = plan_settings(llama_8b(), axis_settings=METHODS["tidekv-snapkv"].settings({"window": 256}))
    return replace(case, free_bytes=Planner(replace(case, **changes), plans).bytes(LENGTH).peak)


def test_what_fits_is_left_alone(plans: Path) -> None:
    case = plan_settings(llama_8b())
    plan = fitter(plans, case).plan(case, LENGTH)
    assert plan.fits and plan.changes == () and plan.settings == case


def test_first_the_chunk_no_smaller_than_it_must_be(plans: Path) -> None:
    case = with_room_for(plans, chunk_size=512)
    plan = fitter(plans, case).plan(case, LENGTH)
    assert plan.fits and (plan.settings.chunk_size, plan.settings.budget_tokens) == (512, 4096)
    (change,) = plan.changes
    assert change.startswith("chunk_size 2048 -> 512: the predicted peak of ") and " free" in change


def test_then_the_budget(plans: Path) -> None:
    case = with_room_for(plans, chunk_size=256, score_block=256, budget_tokens=1024)
    plan = fitter(plans, case).plan(case, LENGTH)
    assert plan.fits and plan.settings.budget_tokens == 1024
    assert [change.split(" ")[0] for change in plan.changes] == ["chunk_size", "score_block", "budget"]


@pytest.mark.slow
def test_what_the_user_named_stays(plans: Path) -> None:
    case = with_room_for(plans, chunk_size=512)
    assert not fitter(plans, case, 4096, "chunk_size", "budget").plan(case, LENGTH).fits
    plan = fitter(plans, case, 4096, "chunk_size").plan(case, LENGTH)
    assert plan.settings.chunk_size == 2048 and plan.fits and (plan.settings.budget_tokens or 0) < 4096


def test_nothing_is_lowered_below_its_floor(plans: Path) -> None:
    case = plan_settings(llama_8b(), free_bytes=15 * GIB)
    plan = fitter(plans, case).plan(case, LENGTH)
    assert not plan.fits
    assert (plan.settings.chunk_size, plan.settings.budget_tokens) == (256, 256)


@pytest.mark.slow
def test_the_whole_prompt_has_no_chunk_to_lower(plans: Path) -> None:
    case = plan_settings(llama_8b(), method=method("oneshot"), free_bytes=16 * GIB, budget_tokens=256)
    plan = fitter(plans, case, 256, "score_block").plan(case, LENGTH)
    assert not plan.fits and plan.settings.chunk_size == 2048
    error = fitter(plans, case, 256, "score_block").refusal(plan)
    assert "--schedule tide" in error.hint


@pytest.mark.slow
def test_auto_takes_the_largest_budget_that_fits(plans: Path) -> None:
    case = with_room_for(plans, budget_tokens=9000)
    plan = fitter(plans, case, "auto", "budget").plan(case, LENGTH)
    assert plan.fits and plan.settings.budget_tokens == 9000 // 64 * 64
    more = replace(plan.settings, budget_tokens=plan.settings.budget_tokens + 64)
    assert not Planner(more, plans).fits(LENGTH)
    least = Planner(replace(plan.settings, budget_tokens=case.window), plans).largest_prompt
    assert plan.memory_prompt_tokens == least  # the longest prompt is that of the least budget


@pytest.mark.slow
@pytest.mark.parametrize(("gib", "budget"), [(64, LENGTH), (15, 32)])
def test_auto_at_its_ends(plans: Path, gib: int, budget: int) -> None:
    case = plan_settings(llama_8b(), free_bytes=gib * GIB)
    assert fitter(plans, case, "auto", "budget").plan(case, LENGTH).settings.budget_tokens == budget


def test_the_refusal_says_what_helps(plans: Path) -> None:
    case = with_room_for(plans, chunk_size=512)
    owner = fitter(plans, case, 4096, "chunk_size", "budget")
    error = owner.refusal(owner.plan(case, LENGTH))
    assert error.code == 4 and "exceeds" in error.message
    assert "--budget 256 fits" in error.hint or "--chunk-size 256 fits" in error.hint
    longest = owner.plan(case, LENGTH).memory_prompt_tokens
    assert f"a prompt of {longest} tokens fits" in error.hint
    alone = plan_settings(llama_8b(), free_bytes=8 * GIB)
    hint = fitter(plans, alone).refusal(fitter(plans, alone).plan(alone, 1)).hint
    assert "weights and reserve alone take 14.9" in hint and "no prompt fits" in hint
    single = replace(alone, dtype="float32", free_bytes=20 * GIB)
    assert "--dtype bfloat16 fits" in fitter(plans, single).refusal(fitter(plans, single).plan(single, 1)).hint


def test_gains_are_real(plans: Path) -> None:
    case = plan_settings(llama_8b(), free_bytes=17 * GIB)
    owner = fitter(plans, case)
    plan = owner.plan(case, 1000)
    gains = owner.gains(plan)
    assert set(gains) == {"--chunk-size 256", "--budget 256"}
    assert all(tokens > (plan.memory_context_tokens or 0) for tokens in gains.values())
    longest = Planner(replace(case, chunk_size=256), plans).largest_prompt
    assert longest is not None and gains["--chunk-size 256"] == longest + case.max_new_tokens


def test_where_the_whole_cache_would_fit_too(plans: Path) -> None:
    case = plan_settings(llama_8b(), free_bytes=64 * GIB)
    most = fitter(plans, case).plan(case, LENGTH).full_cache_peak
    real = Planner(replace(case, budget_tokens=None), plans).bytes(LENGTH).peak
    assert most is not None and real <= most <= real * 102 // 100
    tight = replace(case, free_bytes=most - 1)
    assert fitter(plans, tight).plan(tight, LENGTH).full_cache_peak is None
    unknown = replace(case, free_bytes=None)
    assert fitter(plans, unknown).plan(unknown, LENGTH).full_cache_peak is None
    assert fitter(plans, case).plan(case, 4000).full_cache_peak is None  # nothing is evicted


def test_no_flag_asks_for_less_than_a_selector_keeps() -> None:
    wide = plan_settings(llama_8b(), axis_settings=METHODS["snapkv"].settings({"window": 512}), budget_tokens=1024)
    assert raising_flags(wide) == ["--chunk-size 256", "--budget 512"]
    assert raising_flags(replace(wide, budget_tokens=512)) == ["--chunk-size 256"]
