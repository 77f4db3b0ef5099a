"""Plan settings written for a test. Knows nothing of what is tested."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from tidekv_cli.catalog import shape_of
from tidekv_cli.engine.budgets import BudgetPolicy
from tidekv_cli.engine.budgets.uniform import EvenHeads, EvenLayers
from tidekv_cli.methods import Method
from tidekv_cli.model_spec import spec_from_config
from tidekv_cli.plan_settings import PlanSettings

GIB = 1 << 30


def llama_8b() -> dict[str, Any]:
    """The config of Llama-3.1-8B, as shipped."""
    config = shape_of("llama-3.1-8b")
    assert config is not None
    return config


def method(schedule: str = "tide", selector: str = "snapkv") -> Method:
    """A point on the axes."""
    return Method("m", schedule, selector, "uniform", "dense", "")


def uniform(budget: int) -> BudgetPolicy:
    """`budget` rows for every head of every layer."""
    return BudgetPolicy(budget, EvenLayers(), EvenHeads())


def plan_settings(config: Mapping[str, Any] | None = None, **changes: Any) -> PlanSettings:
    """Llama-3.1-8B in BF16 on a 24 GiB CUDA device, the paper's main setting, unless changed.

    `axis_settings` follow the method's selector unless given.
    """
    config = llama_8b() if config is None else config
    chosen = changes.get("method", method())
    values = changes.get("axis_settings", chosen.settings({}))
    selector = chosen.selector_info.build(values)
    base = PlanSettings(
        spec=spec_from_config(config, "test"),
        method=chosen,
        dtype="bfloat16",
        chunk_size=2048,
        score_block=2048,
        budget_tokens=4096,
        axis_settings=values,
        window=selector.window,
        mandatory_tokens=selector.mandatory_tokens,
        slots=selector.rolling is not None and selector.rolling.slots,
        max_new_tokens=1,
        attention="sdpa",
        reserve_items={},
        free_bytes=24 * GIB,
        config=config,
        device_kind="cuda",
    )
    return replace(base, **changes)


def marked(seeds: Iterable[Any], slow: int) -> list[Any]:
    """Parameters of tests: the first so many are `slow`, the others `long`."""
    return [
        pytest.param(seed, marks=pytest.mark.slow if number < slow else pytest.mark.long)
        for number, seed in enumerate(seeds)
    ]
