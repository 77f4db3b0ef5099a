"""From planned settings to the engine's: one place, so that what is simulated is what runs."""

from __future__ import annotations

import torch

from tidekv_cli.engine.attention import Attention
from tidekv_cli.engine.budgets.uniform import uniform
from tidekv_cli.engine.prefill import PrefillSettings
from tidekv_cli.methods import SELECTORS
from tidekv_cli.plan_settings import PlanSettings


def engine_settings(settings: PlanSettings, length: int, attention: Attention) -> PrefillSettings:
    """Prefill settings for a prompt of `length` tokens. Raises `UsageError` for impossible selector parameters."""
    return PrefillSettings(
        schedule=settings.method.schedule,
        selector=SELECTORS[settings.method.selector].build(settings.selector_settings),
        policy=uniform(length if settings.budget_tokens is None else settings.budget_tokens),
        attention=attention,
        chunk_size=settings.chunk_size,
        score_block=settings.score_block,
        slack=settings.max_new_tokens,
        record_kept=settings.record_kept,
    )


def torch_dtype(settings: PlanSettings) -> torch.dtype:
    """The dtype of weights and activations."""
    dtype: torch.dtype = getattr(torch, settings.dtype)
    return dtype
