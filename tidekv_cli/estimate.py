"""Time estimates from a device's bandwidth and arithmetic rate: what it takes at best (roofline). Measures nothing."""

from __future__ import annotations

from dataclasses import dataclass

from tidekv_cli.model_spec import has_experts
from tidekv_cli.plan_settings import PlanSettings
from tidekv_cli.units import ITEM_BYTES


@dataclass(frozen=True, slots=True)
class Estimate:
    """Time to the first token in seconds and tokens per second after it; None where the rates are not known."""

    ttft_s: float | None
    decode_tokens_per_s: float | None


def estimate(settings: PlanSettings, length: int, weight_bytes: int, cache_bytes: int) -> Estimate:
    """The least time that a prompt of `length` tokens can take at the rates in `settings`.

    Unknown for a mixture of experts: how much of it a token uses is not looked at.
    """
    rates = settings.rates
    if rates.bandwidth_gb_s is None or rates.tflops is None or has_experts(settings.config):
        return Estimate(None, None)
    spec, item = settings.spec, ITEM_BYTES[settings.dtype]
    bandwidth, rate = rates.bandwidth_gb_s * 1e9, rates.tflops * 1e12
    embedding = spec.vocab_size * spec.hidden_size
    in_layers = weight_bytes // item - embedding * (1 if spec.tied_embeddings else 2)
    seen = length / 2  # keys by a query, in the mean
    if settings.method.schedule == "online" and settings.budget_tokens is not None:
        seen = min(seen, settings.budget_tokens + settings.chunk_size / 2)
    # Two operations a weight and token; queries times keys, and weights times values.
    operations = 2 * in_layers * length + 4 * spec.layers * spec.heads * spec.head_dim * length * seen
    passes = 1 if settings.method.schedule == "oneshot" else -(-length // settings.chunk_size)
    ttft = max(operations / rate, passes * in_layers * item / bandwidth)
    kept = min(length if settings.budget_tokens is None else settings.budget_tokens, length)
    cache = min(2 * spec.layers * spec.kv_heads * spec.head_dim * kept * item, cache_bytes)
    return Estimate(ttft, bandwidth / ((in_layers + embedding) * item + cache))
