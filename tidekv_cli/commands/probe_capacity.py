"""`tidekv probe-capacity`: flags to a request. Imports nothing heavy until it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from tidekv_cli.commands import options
from tidekv_cli.commands.options import INPUT, OUTPUT, option, pairs
from tidekv_cli.errors import UsageError
from tidekv_cli.request import RunRequest


def probe_capacity(
    context: typer.Context,
    model: options.Model = None,
    contexts: Annotated[
        str | None, option("--context", panel=INPUT, help="Ask about these lengths instead: N[,N...].")
    ] = None,
    simulate: Annotated[
        bool, option("--simulate", panel=INPUT, help="Every length on fake tensors, not from the plan's lines.")
    ] = False,
    verify: Annotated[
        bool, option("--verify", panel=INPUT, help="Really run the largest length, and one chunk more.")
    ] = False,
    offline: options.Offline = False,
    method: options.Method = None,
    selector: options.Selector = None,
    schedule: options.Schedule = None,
    budget_policy: options.BudgetPolicy = None,
    kv_store: options.KvStore = None,
    budget: options.Budget = None,
    parameters: options.Parameters = None,
    chunk_size: options.ChunkSize = None,
    score_block: options.ScoreBlock = None,
    attention: options.Attention = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    profile: options.Profile = None,
    memory_limit: options.MemoryLimit = None,
    max_new_tokens: options.MaxNewTokens = None,
    as_json: options.AsJson = False,
    arguments: Annotated[
        bool, option("--args", panel=OUTPUT, help="Print flags for `tidekv run` instead of the answer.")
    ] = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Find the largest context that fits, without loading any weight.

    Example: tidekv probe-capacity -m llama-3.1-8b --profile rtx-4090
    """
    from tidekv_cli.prober import Prober, ProbeRequest

    request = RunRequest(
        model=model,
        max_new_tokens=max_new_tokens,
        method=method,
        selector=selector,
        schedule=schedule,
        budget_policy=budget_policy,
        kv_store=kv_store,
        budget=budget,
        chunk_size=chunk_size,
        score_block=score_block,
        attention=attention,
        dtype=dtype,
        device=device,
        profile=profile,
        memory_limit=memory_limit,
        offline=offline,
        json=as_json,
        quiet=quiet,
        verbose=verbose,
        parameters=pairs("--set", parameters, "window=32"),
    )
    Prober(request, ProbeRequest(_lengths(contexts), simulate, verify, arguments), context.obj).run()


def _lengths(text: str | None) -> tuple[int, ...]:
    parts = [] if text is None else text.split(",")
    if not all(part.strip().isdecimal() and part.isascii() and len(part) < 16 for part in parts):
        raise UsageError(f"--context {text} is no list of lengths", "write it like --context 8192,32768")
    return tuple(int(part) for part in parts)
