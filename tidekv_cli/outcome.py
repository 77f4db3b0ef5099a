"""What a run has found out so far, and the JSON document that it becomes. Prints nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tidekv_cli import __version__
from tidekv_cli.device import Device
from tidekv_cli.errors import TideError
from tidekv_cli.plan import Plan

SCHEMA = 1


@dataclass(slots=True)
class Outcome:
    """Filled step by step; what a run did not reach stays None and is null in the document. Times in seconds.

    `lowered` says what was made smaller on the way, for want of memory.
    """

    model_name: str
    model_source: str
    device: Device
    profile_name: str
    plan: Plan
    document_tokens: Sequence[tuple[str, int]]
    prompt_tokens: int
    truncated_tokens: int
    text: str = ""
    answer_tokens: int = 0
    finish_reason: str | None = None
    load_s: float | None = None
    prefill_s: float | None = None
    scoring_s: float | None = None
    first_token_s: float | None = None
    decode_s: float | None = None
    total_s: float | None = None
    live_peak_bytes: int | None = None
    allocated_peak_bytes: int | None = None
    reserved_peak_bytes: int | None = None
    process_peak_bytes: int | None = None
    lowered: tuple[str, ...] = ()
    cache_bytes: int | None = None
    cache_tokens_per_layer: list[int] | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens after the first, over the time they took."""
        if not self.decode_s or self.answer_tokens < 2:
            return None
        return (self.answer_tokens - 1) / self.decode_s


def outcome_document(outcome: Outcome) -> dict[str, Any]:
    """The `--json` document."""
    spec = outcome.plan.settings.spec
    return {
        "schema": SCHEMA,
        "version": __version__,
        "model": {
            "name": outcome.model_name,
            "source": outcome.model_source,
            "architecture": spec.architecture,
            "dtype": outcome.plan.settings.dtype,
            "layers": spec.layers,
            "context_window": spec.context_window,
        },
        "device": device_document(outcome.device, outcome.profile_name),
        "plan": plan_document(outcome.plan),
        "prompt": {
            "tokens": outcome.prompt_tokens,
            "documents": [{"path": path, "tokens": tokens} for path, tokens in outcome.document_tokens],
            "truncated_tokens": outcome.truncated_tokens,
        },
        "result": {"text": outcome.text, "tokens": outcome.answer_tokens, "finish_reason": outcome.finish_reason},
        "timing_s": {
            "load": outcome.load_s,
            "prefill": outcome.prefill_s,
            "scoring": outcome.scoring_s,
            "first_token": outcome.first_token_s,
            "decode": outcome.decode_s,
            "total": outcome.total_s,
        },
        "decode_tokens_per_s": outcome.decode_tokens_per_s,
        "memory": {
            "live_peak_bytes": outcome.live_peak_bytes,
            "allocated_peak_bytes": outcome.allocated_peak_bytes,
            "reserved_peak_bytes": outcome.reserved_peak_bytes,
            "process_peak_bytes": outcome.process_peak_bytes,
            "cache_bytes": outcome.cache_bytes,
            "cache_tokens_per_layer": outcome.cache_tokens_per_layer,
        },
        "warnings": outcome.warnings,
    }


def device_document(device: Device, profile_name: str) -> dict[str, Any]:
    """The part `device` of a `--json` document."""
    return {
        "name": device.name,
        "kind": device.kind,
        "total_bytes": device.total_bytes,
        "free_bytes": device.free_bytes,
        "unified": device.unified,
        "profile": profile_name,
        "sources": dict(device.sources),
    }


def plan_document(plan: Plan) -> dict[str, Any]:
    """The part `plan` of a `--json` document."""
    settings, planned = plan.settings, plan.bytes
    method = settings.method
    return {
        "method": method.name,
        "schedule": method.schedule,
        "selector": method.selector,
        "budget_policy": method.budget_policy,
        "kv_store": method.kv_store,
        "chunk_size": settings.chunk_size,
        "score_block": settings.score_block,
        "budget_tokens": settings.budget_tokens,
        "placement": dict.fromkeys(("weights", "bridge", "active_kv", "cache"), "device"),
        "attention": settings.attention,
        "dtype": settings.dtype,
        "prompt_tokens": plan.prompt_tokens,
        "max_new_tokens": settings.max_new_tokens,
        "bytes": {**asdict(planned), "peak": planned.peak},
        "reserve_items": dict(settings.reserve_items),
        "headroom_bytes": plan.headroom_bytes,
        "max_context_tokens": plan.max_context_tokens,
        "estimate": asdict(plan.estimate),
        "changes": list(plan.changes),
        "full_cache_peak_bytes": plan.full_cache_peak,
    }


def error_document(error: TideError) -> dict[str, Any]:
    """What `--json` prints instead when a run fails."""
    return {
        "schema": SCHEMA,
        "error": {"code": int(error.code), "kind": error.kind, "message": error.message, "hint": error.hint},
    }
