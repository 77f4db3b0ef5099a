"""The way in from Python: keywords to a request, and that to a model. Prints nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from tidekv_cli.model import Model, Tell
from tidekv_cli.request import RunRequest


def open_model(
    model: str | None = None,
    *,
    method: str | None = None,
    schedule: str | None = None,
    selector: str | None = None,
    budget_policy: str | None = None,
    kv_store: str | None = None,
    budget: int | str | None = None,
    parameters: Mapping[str, Any] | None = None,
    chunk_size: int | None = None,
    score_block: int | None = None,
    attention: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    profile: str | None = None,
    memory_limit: str | None = None,
    max_new_tokens: int | None = None,
    offline: bool = False,
    environ: Mapping[str, str] | None = None,
    note: Tell | None = None,
    warn: Tell | None = None,
) -> Model:
    """Find a model and settle how it is run; weights are loaded by the first prefill.

    Arguments are the flags of `tidekv run`, and mean what they mean there; what is None comes from the environment,
    the config file and the device's profile. `note` hears of what is fetched, `warn` of what may not be expected.
    Raises a `tidekv_cli.errors.TideError`: `UsageError`, `DeviceError` or `ModelError`.
    """
    request = RunRequest(
        model=model,
        method=method,
        schedule=schedule,
        selector=selector,
        budget_policy=budget_policy,
        kv_store=kv_store,
        budget=None if budget is None else str(budget),
        parameters={key: str(value) for key, value in (parameters or {}).items()},
        chunk_size=chunk_size,
        score_block=score_block,
        attention=attention,
        dtype=dtype,
        device=device,
        profile=profile,
        memory_limit=memory_limit,
        max_new_tokens=max_new_tokens,
        offline=offline,
    )
    opened = Model(request, os.environ if environ is None else environ, note, warn)
    opened.open()
    return opened
