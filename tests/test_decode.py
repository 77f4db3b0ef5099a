"""Sampling, end tokens, the limit, and where positions go on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.planning import uniform
from tests.references import plain_greedy, plain_steps_with_kept_rows
from tidekv_cli.engine.decode import Sampler
from tidekv_cli.engine.flash_cpu import FlashCPU
from tidekv_cli.engine.prefill import PrefillSettings
from tidekv_cli.engine.sampling import SamplingSettings
from tidekv_cli.engine.selectors.snapkv import SnapKV
from tidekv_cli.engine.session import Session
from tidekv_cli.errors import ModelError, UsageError

CPU = torch.device("cpu")


def chosen(settings: SamplingSettings, logits: torch.Tensor, count: int = 400) -> list[int]:
    sampler = Sampler(settings, CPU)
    return [sampler.choose(logits) for _ in range(count)]


def test_greedy_and_tiny_temperature_take_the_best() -> None:
    logits = torch.tensor([0.0, 3.0, 2.9, -1.0])
    assert set(chosen(SamplingSettings(), logits, 3)) == {1}
    for temperature in (1e-30, 1e-50, 5e-324):
        assert set(chosen(SamplingSettings(temperature=temperature, seed=0), logits, 20)) == {1}


def test_top_p_keeps_the_smallest_set_with_that_mass() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert set(chosen(SamplingSettings(1.0, 0.4, 0), logits)) == {0}
    assert set(chosen(SamplingSettings(1.0, 0.7, 0), logits)) == {0, 1}
    assert set(chosen(SamplingSettings(1.0, 1.0, 0), logits)) == {0, 1, 2, 3}
    share = chosen(SamplingSettings(1.0, 1.0, 1), logits, 4000).count(0) / 4000
    assert abs(share - 0.5) < 0.03


@pytest.mark.parametrize("settings", [SamplingSettings(), SamplingSettings(0.7, 0.9, 0)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers(settings: SamplingSettings, bad: float) -> None:
    with pytest.raises(ModelError, match="not finite"):
        chosen(settings, torch.tensor([0.0, bad, 1.0]), 1)
    assert set(chosen(settings, torch.tensor([0.0, float("-inf"), -float("inf")]), 5)) == {0}


def test_a_tiny_top_p_takes_the_best() -> None:
    logits = torch.tensor([0.0, 3.0, 2.9])
    for top_p in (1e-12, 1e-300, 5e-324):
        assert set(chosen(SamplingSettings(1.0, top_p, 0), logits, 20)) == {1}


def test_seed_repeats() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0))
    assert chosen(SamplingSettings(1.0, 0.9, 7), logits) == chosen(SamplingSettings(1.0, 0.9, 7), logits)
    assert chosen(SamplingSettings(1.0, 0.9, 7), logits) != chosen(SamplingSettings(1.0, 0.9, 8), logits)


@pytest.mark.parametrize("values", [(-1.0, 1.0), (float("nan"), 1.0), (1.0, 0.0), (1.0, 1.1), (1.0, float("nan"))])
def test_impossible_sampling(values: tuple[float, float]) -> None:
    with pytest.raises(UsageError):
        SamplingSettings(*values)


def test_generation_ends_before_any_end_token_and_outgrows_its_slack(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model()
    ids = torch.randint(0, 128, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = plain_greedy(model, ids, 30)
    settings = PrefillSettings("tide", SnapKV(), uniform(40), FlashCPU(), 16, 64, 2)  # slack for 2, then growth
    session = Session(model, frozenset())
    assert list(session.generate(session.prefill(ids, settings)[0], SamplingSettings(), 30)) == expected
    end = frozenset({expected[7], expected[20]})
    first = min(expected.index(token) for token in end)
    stopping = Session(model, end)
    assert list(stopping.generate(stopping.prefill(ids, settings)[0], SamplingSettings(), 30)) == expected[:first]


@pytest.mark.parametrize("limit", [0, 1, 5])
def test_the_limit_and_what_joins_the_cache(tiny_model: Callable[..., Any], limit: int) -> None:
    session = Session(tiny_model(), frozenset())
    prompt, _ = session.prefill(list(range(50)), PrefillSettings("tide", SnapKV(8), uniform(20), FlashCPU(), 16, 64, 9))
    assert len(list(session.generate(prompt, SamplingSettings(), limit))) == limit
    joined = max(limit - 1, 0)  # nothing asks what follows the last token
    assert [store.length for store in prompt.cache] == [20 + joined] * 2


def test_positions_go_on_at_the_prompts_end_after_eviction(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model()
    ids = torch.randint(0, 128, (90,), generator=torch.Generator().manual_seed(2)).tolist()
    session = Session(model, frozenset())
    prompt, _ = session.prefill(ids, PrefillSettings("tide", SnapKV(8), uniform(20), FlashCPU(), 16, 64, 4))
    tokens = list(session.generate(prompt, SamplingSettings(), 12))
    assert tokens[0] == int(prompt.logits.argmax())
    expected = plain_steps_with_kept_rows(model, ids, prompt.kept, tokens[:-1])
    assert tokens[1:] == [int(logits.argmax()) for logits in expected]


def test_a_prompt_is_generated_from_once(tiny_model: Callable[..., Any]) -> None:
    session = Session(tiny_model(), frozenset())
    prompt, _ = session.prefill(list(range(40)), PrefillSettings("tide", SnapKV(), uniform(36), FlashCPU(), 16, 64, 8))
    assert len(list(session.generate(prompt, SamplingSettings(), 4))) == 4
    with pytest.raises(ValueError, match="has been generated from"):
        next(session.generate(prompt, SamplingSettings(), 4))


def test_kept_positions_are_held_on_request_only(tiny_model: Callable[..., Any]) -> None:
    session = Session(tiny_model(), frozenset())
    settings = PrefillSettings("tide", SnapKV(), uniform(36), FlashCPU(), 16, 64, 8)
    asked, _ = session.prefill(list(range(60)), settings)
    unasked, _ = session.prefill(list(range(60)), replace(settings, record_kept=False))
    assert len(asked.kept) == 2 and unasked.kept == [] and torch.equal(asked.logits, unasked.logits)
