"""Time estimates against the arithmetic done by hand."""

from __future__ import annotations

import pytest

from tests.planning import llama_8b, method, plan_settings
from tidekv_cli.estimate import estimate
from tidekv_cli.plan_settings import Rates

WEIGHTS = 2 * 8_030_261_248  # bytes


def test_llama_8b_by_hand() -> None:
    settings = plan_settings(llama_8b(), rates=Rates(bandwidth_gb_s=1000.0, tflops=100.0))
    found = estimate(settings, 65536, WEIGHTS)
    layers = 32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336 + 2 * 4096)
    work = 2 * layers * 65536 + 4 * 32 * 32 * 128 * 65536**2 / 2
    assert found.ttft_s == pytest.approx(work / 100e12, rel=1e-3)
    moved = 2 * (layers + 128256 * 4096) + 2 * 32 * 8 * 128 * 4096 * 2
    assert found.decode_tokens_per_s == pytest.approx(1000e9 / moved, rel=1e-3)


def test_weights_are_read_once_a_chunk() -> None:
    slow = Rates(bandwidth_gb_s=1.0, tflops=1e6)
    tide = estimate(plan_settings(llama_8b(), rates=slow, chunk_size=1000), 10_000, WEIGHTS).ttft_s
    whole = estimate(plan_settings(llama_8b(), rates=slow, method=method("oneshot")), 10_000, WEIGHTS).ttft_s
    assert tide is not None and whole is not None and tide == pytest.approx(10 * whole)


def test_a_short_prompt_keeps_no_more_than_it_is() -> None:
    rates = Rates(bandwidth_gb_s=100.0, tflops=1.0)
    short = estimate(plan_settings(llama_8b(), rates=rates), 10, WEIGHTS).decode_tokens_per_s
    assert (
        short == estimate(plan_settings(llama_8b(), rates=rates, budget_tokens=None), 10, WEIGHTS).decode_tokens_per_s
    )
    assert (short or 0) > (estimate(plan_settings(llama_8b(), rates=rates), 10_000, WEIGHTS).decode_tokens_per_s or 0)


def test_unknown_rates_give_no_estimate() -> None:
    for rates in (Rates(), Rates(100.0, None), Rates(None, 1.0)):
        found = estimate(plan_settings(llama_8b(), rates=rates), 1000, WEIGHTS)
        assert found.ttft_s is None and found.decode_tokens_per_s is None


def test_a_mixture_of_experts_has_no_estimate() -> None:
    rates = Rates(bandwidth_gb_s=1.0, tflops=1.0)
    assert estimate(plan_settings(llama_8b() | {"num_local_experts": 8}, rates=rates), 1000, WEIGHTS).ttft_s is None
