"""From planned settings to the engine's: one place, so that what is simulated is what runs."""

from __future__ import annotations

import torch

from tidekv_cli.engine.attention import Attention
from tidekv_cli.engine.budgets import BudgetPolicy
from tidekv_cli.engine.prefill import PrefillSettings
from tidekv_cli.plan_settings import PlanSettings


def engine_settings(settings: PlanSettings, length: int, attention: Attention) -> PrefillSettings:
    """Prefill settings for a prompt of `length` tokens. Raises `UsageError` for impossible parameters."""
    method, values = settings.method, settings.axis_settings
    whole = length + settings.max_new_tokens
    budget = whole if settings.budget_tokens is None else settings.budget_tokens
    policy = method.policy_info
    return PrefillSettings(
        schedule=method.schedule,
        selector=method.selector_info.build(values),
        policy=BudgetPolicy(budget, policy.layers.build(values), policy.heads.build(values)),
        attention=attention,
        chunk_size=settings.chunk_size,
        score_block=settings.score_block,
        slack=settings.max_new_tokens,
        record_kept=settings.record_kept,
        store=method.store_info.build(values),
    )


def torch_dtype(settings: PlanSettings) -> torch.dtype:
    """The dtype of weights and activations."""
    dtype: torch.dtype = getattr(torch, settings.dtype)
    return dtype
