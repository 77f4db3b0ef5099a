"""Time estimates against the arithmetic done by hand."""

from __future__ import annotations

import pytest

from tests.planning import llama_8b, method, plan_settings
from tidekv_cli.estimate import estimate
from tidekv_cli.plan_settings import Rates

WEIGHTS, CACHE = 2 * 8_030_261_248, 1 << 40  # bytes


def test_llama_8b_by_hand() -> None:
    settings = plan_settings(llama_8b(), rates=Rates(bandwidth_gb_s=1000.0, tflops=100.0))
    found = estimate(settings, 65536, WEIGHTS, CACHE)
    layers = 32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336 + 2 * 4096)
    work = 2 * layers * 65536 + 4 * 32 * 32 * 128 * 65536**2 / 2
    assert found.ttft_s == pytest.approx(work / 100e12, rel=1e-3)
    moved = 2 * (layers + 128256 * 4096) + 2 * 32 * 8 * 128 * 4096 * 2
    assert found.decode_tokens_per_s == pytest.approx(1000e9 / moved, rel=1e-3)


def test_weights_are_read_once_a_chunk() -> None:
    slow = Rates(bandwidth_gb_s=1.0, tflops=1e6)
    tide = estimate(plan_settings(llama_8b(), rates=slow, chunk_size=1000), 10_000, WEIGHTS, CACHE).ttft_s
    whole = estimate(plan_settings(llama_8b(), rates=slow, method=method("oneshot")), 10_000, WEIGHTS, CACHE).ttft_s
    assert tide is not None and whole is not None and tide == pytest.approx(10 * whole)


def test_a_short_prompt_keeps_no_more_than_it_is() -> None:
    rates = Rates(bandwidth_gb_s=100.0, tflops=1.0)
    short = estimate(plan_settings(llama_8b(), rates=rates), 10, WEIGHTS, CACHE).decode_tokens_per_s
    assert (
        short
        == estimate(plan_settings(llama_8b(), rates=rates, budget_tokens=None), 10, WEIGHTS, CACHE).decode_tokens_per_s
    )
    assert (short or 0) > (
        estimate(plan_settings(llama_8b(), rates=rates), 10_000, WEIGHTS, CACHE).decode_tokens_per_s or 0
    )


def test_unknown_rates_give_no_estimate() -> None:
    for rates in (Rates(), Rates(100.0, None), Rates(None, 1.0)):
        found = estimate(plan_settings(llama_8b(), rates=rates), 1000, WEIGHTS, CACHE)
        assert found.ttft_s is None and found.decode_tokens_per_s is None


def test_a_mixture_of_experts_has_no_estimate() -> None:
    rates = Rates(bandwidth_gb_s=1.0, tflops=1.0)
    assert (
        estimate(plan_settings(llama_8b() | {"num_local_experts": 8}, rates=rates), 1000, WEIGHTS, CACHE).ttft_s is None
    )


def test_reading_online_sees_no_more_than_is_held() -> None:
    rates = Rates(bandwidth_gb_s=1e6, tflops=1.0)
    tide, online = (
        estimate(plan_settings(llama_8b(), method=method(schedule), rates=rates), 100_000, WEIGHTS, CACHE).ttft_s
        for schedule in ("tide", "online")
    )
    assert tide is not None and online is not None
    assert tide - online == pytest.approx(4 * 32 * 32 * 128 * 100_000 * (50_000 - 4096 - 1024) / 1e12, rel=1e-3)


def test_a_cache_in_few_bits_is_read_as_it_is() -> None:
    case = plan_settings(llama_8b(), budget_tokens=None, rates=Rates(bandwidth_gb_s=1000.0, tflops=1.0))
    whole, few = (estimate(case, 100_000, WEIGHTS, held).decode_tokens_per_s for held in (CACHE, 1 << 31))
    assert few is not None and whole is not None and few > 1.5 * whole
