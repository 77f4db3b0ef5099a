"""`tidekv run`: flags to a request. Imports nothing heavy until it runs."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from tidekv_cli.commands import options
from tidekv_cli.commands.options import INPUT, OUTPUT, option, pairs
from tidekv_cli.request import RunRequest


def run(
    context: typer.Context,
    documents: Annotated[
        list[str] | None, typer.Argument(help="Files, in order; - is stdin, which is also read when none is given.")
    ] = None,
    model: options.Model = None,
    prompt: Annotated[
        str | None, option("-p", "--prompt", panel=INPUT, help="Question that follows the documents.")
    ] = None,
    system: Annotated[str | None, option("-s", "--system", panel=INPUT, help="System message.")] = None,
    raw: Annotated[bool, option("--raw", panel=INPUT, help="No chat template.")] = False,
    template_arg: Annotated[
        list[str] | None, option("--template-arg", panel=INPUT, help="KEY=VALUE for the chat template.")
    ] = None,
    truncate: Annotated[
        str,
        option("--truncate", panel=INPUT, help="Drop from a document that does not fit: error, head, tail, middle."),
    ] = "error",
    allow_beyond_window: Annotated[
        bool, option("--allow-beyond-window", panel=INPUT, help="Only warn beyond the model's window.")
    ] = False,
    encoding: Annotated[str, option("--encoding", panel=INPUT, help="How documents are encoded (utf-8).")] = "utf-8",
    errors: Annotated[
        str, option("--errors", panel=INPUT, help="On undecodable bytes: strict, replace, ignore.")
    ] = "strict",
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
    temperature: Annotated[float, option("--temperature", panel=OUTPUT, help="0 is greedy (default).")] = 0.0,
    top_p: Annotated[float, option("--top-p", panel=OUTPUT, help="Nucleus mass (1).")] = 1.0,
    seed: Annotated[int | None, option("--seed", panel=OUTPUT, help="For sampling.")] = None,
    stop: Annotated[list[str] | None, option("--stop", panel=OUTPUT, help="End the answer before this text.")] = None,
    as_json: options.AsJson = False,
    no_stream: Annotated[bool, option("--no-stream", panel=OUTPUT, help="Print the answer at its end.")] = False,
    kept: Annotated[str | None, option("--kept", panel=OUTPUT, help="Write kept positions to FILE.npz.")] = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    dry_run: Annotated[bool, option("--dry-run", panel=OUTPUT, help="Report and stop before loading.")] = False,
) -> None:
    """Read documents through a long prefill and stream the answer.

    Example: tidekv run report.txt -p "What was decided?"
    """
    from tidekv_cli.runner import Runner

    request = RunRequest(
        documents=tuple(documents or ()),
        model=model,
        prompt=prompt,
        system=system,
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
        truncate=truncate,
        allow_beyond_window=allow_beyond_window,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        stop=tuple(stop or ()),
        raw=raw,
        template_arguments={
            key: _literal(value)
            for key, value in pairs("--template-arg", template_arg, "enable_thinking=false").items()
        },
        offline=offline,
        encoding=encoding,
        errors=errors,
        json=as_json,
        stream=not no_stream,
        quiet=quiet,
        verbose=verbose,
        dry_run=dry_run,
        parameters=pairs("--set", parameters, "window=32"),
        kept=kept,
    )
    raise typer.Exit(int(Runner(request, context.obj).run()))


_PYTHON_WORDS = {"True": True, "False": False, "None": None}


def _literal(value: str) -> Any:
    """`true`, numbers and lists as themselves, Python's `True`, `False` and `None` too; anything else as text."""
    if value in _PYTHON_WORDS:
        return _PYTHON_WORDS[value]
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
