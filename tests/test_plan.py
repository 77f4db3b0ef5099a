"""The plan: exact items equal what is allocated, bounds are bounds, feasibility is monotonic."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.references import storage_bytes
from tidekv_cli.engine.attention import Attention, Eager, FlashCPU
from tidekv_cli.engine.budgets import Uniform
from tidekv_cli.engine.prefill import PrefillSettings
from tidekv_cli.engine.session import Session
from tidekv_cli.methods import SELECTORS, Method
from tidekv_cli.model_spec import ModelSpec, spec_from_config
from tidekv_cli.plan import PlanSettings, best_change, largest_budget, largest_prompt, make_plan, planned_bytes

LLAMA_8B = ModelSpec("LlamaForCausalLM", 32, 4096, 14336, 32, 8, 128, 128256, 131072, False)


def settings(spec: ModelSpec = LLAMA_8B, **changes: Any) -> PlanSettings:
    base = PlanSettings(
        spec=spec,
        method=Method("m", "tide", "snapkv", "uniform", "dense", ""),
        dtype="bfloat16",
        chunk_size=2048,
        score_block=2048,
        budget_tokens=4096,
        window=32,
        max_new_tokens=0,
        attention="sdpa",
        reserve_items={},
        free_bytes=24 << 30,
    )
    return replace(base, **changes)


def test_llama_8b_items_are_the_known_figures() -> None:
    planned = planned_bytes(settings(), 65536)
    gib = 1 << 30
    assert planned.weights / gib == pytest.approx(14.958, abs=0.001)
    assert planned.cache == gib // 2
    assert planned.bridge == gib // 2
    assert planned.active_kv == gib // 4


@pytest.mark.parametrize("schedule", ["tide", "oneshot"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("attention", [FlashCPU(), Eager()], ids=lambda backend: backend.name)
@pytest.mark.parametrize(
    ("length", "chunk", "block", "budget"), [(700, 64, 64, 80), (700, 256, 512, 200), (90, 512, 2048, 40)]
)
def test_exact_items_and_bounds_hold_for_a_real_run(
    tiny_model: Callable[..., Any],
    schedule: str,
    attention: Attention,
    dtype: str,
    length: int,
    chunk: int,
    block: int,
    budget: int,
) -> None:
    model = tiny_model().to(getattr(torch, dtype))
    spec = spec_from_config(model.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}, "tiny")
    plan = planned_bytes(
        settings(
            spec,
            method=Method("m", schedule, "snapkv", "uniform", "dense", ""),
            dtype=dtype,
            attention=attention.name,
            chunk_size=chunk,
            score_block=block,
            budget_tokens=budget,
            max_new_tokens=5,
        ),
        length,
    )
    session = Session(model, frozenset())
    torch.manual_seed(0)
    ids = torch.randint(0, spec.vocab_size, (length,)).tolist()
    choice = PrefillSettings(schedule, SELECTORS["snapkv"].build({}), Uniform(budget), attention, chunk, block, 5)
    prompt, live_peak = session.prefill(ids, choice)
    assert sum(store.nbytes for store in prompt.cache) == plan.cache
    assert sum(p.nbytes for p in model.parameters()) == plan.weights
    small = storage_bytes(model.buffers()) + 8 * length + 4096  # rotary buffers, ids, scalars
    assert live_peak <= plan.peak + small


def test_the_bound_is_close_at_real_shapes(embedded_model: Any, document_ids: list[int]) -> None:
    spec = ModelSpec("LlamaForCausalLM", 30, 576, 1536, 9, 3, 64, 49152, 8192, True)
    case = settings(spec, dtype="float32", chunk_size=512, budget_tokens=256, max_new_tokens=8)
    plan = planned_bytes(case, 1200)
    session = Session(embedded_model.model, frozenset())
    choice = PrefillSettings("tide", SELECTORS["snapkv"].build({}), Uniform(256), FlashCPU(), 512, 2048, 8)
    _, live_peak = session.prefill(document_ids[:1200], choice)
    measured = live_peak - storage_bytes([*embedded_model.model.parameters(), *embedded_model.model.buffers()])
    assert measured <= plan.peak - plan.weights <= 1.35 * measured


def test_feasibility_is_monotonic() -> None:
    draw = random.Random(0)
    for _ in range(200):
        case = settings(
            budget_tokens=draw.choice([None, 64, 1024, 4096]),
            chunk_size=draw.choice([64, 512, 2048]),
            method=Method("m", draw.choice(["tide", "oneshot"]), "snapkv", "uniform", "dense", ""),
            free_bytes=draw.randrange(15 << 30, 64 << 30),
        )
        most = largest_prompt(case)
        assert most is not None
        if most:
            assert make_plan(case, most).fits
        assert not make_plan(case, most + 1).fits
        more = largest_prompt(replace(case, free_bytes=case.free_bytes + (1 << 30)))
        assert more is not None and more >= most
        lengths = sorted(draw.randrange(1, 200_000) for _ in range(4))
        peaks = [planned_bytes(case, length).peak for length in lengths]
        assert peaks == sorted(peaks)


def test_largest_budget() -> None:
    tight = settings(free_bytes=17 << 30)
    budget = largest_budget(tight, 32768)
    assert 0 < budget < 32768
    assert make_plan(replace(tight, budget_tokens=budget), 32768).fits
    assert not make_plan(replace(tight, budget_tokens=budget + 1), 32768).fits
    assert largest_budget(settings(free_bytes=1 << 40), 1000) == 1000
    assert largest_budget(settings(free_bytes=1 << 20), 1000) == 0


def test_more_budget_never_takes_less() -> None:
    for schedule in ("tide", "oneshot"):
        case = settings(method=Method("m", schedule, "snapkv", "uniform", "dense", ""))
        for length in (2000, 40_000):
            peaks = [
                planned_bytes(replace(case, budget_tokens=budget), length).peak
                for budget in (32, 256, length - 1, length, length + 1, None)
            ]
            assert peaks == sorted(peaks)
    full = planned_bytes(replace(case, budget_tokens=None), 2000).peak
    assert largest_budget(replace(case, free_bytes=full), 2000) == 2000


def test_kept_positions_are_counted_where_they_are_held(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model(num_hidden_layers=24)
    spec = spec_from_config(model.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}, "tiny")
    ids = torch.randint(0, spec.vocab_size, (1000,), generator=torch.Generator().manual_seed(0)).tolist()
    weights = storage_bytes([*model.parameters(), *model.buffers()])
    for held in (True, False):
        case = settings(
            spec, dtype="float32", chunk_size=16, score_block=64, budget_tokens=900, max_new_tokens=1, record_kept=held
        )
        choice = PrefillSettings("tide", SELECTORS["snapkv"].build({}), Uniform(900), FlashCPU(), 16, 64, 1, held)
        _, live_peak = Session(model, frozenset()).prefill(ids, choice)
        plan = planned_bytes(case, 1000)
        assert live_peak - weights <= plan.peak - plan.weights


def test_the_largest_context_counts_new_tokens() -> None:
    plan = make_plan(settings(free_bytes=17 << 30, max_new_tokens=100), 1000)
    assert plan.memory_prompt_tokens is not None
    assert plan.max_context_tokens == plan.memory_prompt_tokens + 100
    assert make_plan(settings(free_bytes=1 << 40, max_new_tokens=100), 1000).max_context_tokens == 131072
    assert make_plan(settings(free_bytes=1 << 30), 1000).max_context_tokens == 0


def test_the_change_that_helps_most() -> None:
    oneshot = settings(method=Method("m", "oneshot", "snapkv", "uniform", "dense", ""))
    assert best_change(oneshot, 65536)[0] == "--schedule tide"
    assert best_change(settings(dtype="float32"), 4096)[0] == "--dtype bfloat16"
    flag, peak = best_change(settings(budget_tokens=None), 65536)
    assert flag == "--budget 256" and peak < planned_bytes(settings(budget_tokens=None), 65536).peak


def test_unknown_memory_never_refuses() -> None:
    plan = make_plan(settings(free_bytes=None), 10_000)
    assert plan.fits and plan.headroom_bytes is None and plan.max_context_tokens == 131072
