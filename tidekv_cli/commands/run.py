"""`tidekv run`: flags to a request. Imports nothing heavy until it runs."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from tidekv_cli.errors import UsageError
from tidekv_cli.request import RunRequest

_INPUT, _METHOD, _ENGINE, _OUTPUT = "Input", "Method", "Engine", "Output"


def _option(*names: str, panel: str, help: str, **extra: Any) -> Any:
    return typer.Option(*names, rich_help_panel=panel, help=help, show_default=False, **extra)


def run(
    context: typer.Context,
    documents: Annotated[
        list[str] | None, typer.Argument(help="Files, in order; - is stdin, which is also read when none is given.")
    ] = None,
    model: Annotated[
        str | None, _option("-m", "--model", panel=_INPUT, help="Alias, hub id, directory, or .gguf file.")
    ] = None,
    prompt: Annotated[
        str | None, _option("-p", "--prompt", panel=_INPUT, help="Question that follows the documents.")
    ] = None,
    system: Annotated[str | None, _option("-s", "--system", panel=_INPUT, help="System message.")] = None,
    raw: Annotated[bool, _option("--raw", panel=_INPUT, help="No chat template.")] = False,
    template_arg: Annotated[
        list[str] | None, _option("--template-arg", panel=_INPUT, help="KEY=VALUE for the chat template.")
    ] = None,
    truncate: Annotated[
        str,
        _option("--truncate", panel=_INPUT, help="Drop from a document that does not fit: error, head, tail, middle."),
    ] = "error",
    allow_beyond_window: Annotated[
        bool, _option("--allow-beyond-window", panel=_INPUT, help="Only warn beyond the model's window.")
    ] = False,
    encoding: Annotated[str, _option("--encoding", panel=_INPUT, help="How documents are encoded (utf-8).")] = "utf-8",
    errors: Annotated[
        str, _option("--errors", panel=_INPUT, help="On undecodable bytes: strict, replace, ignore.")
    ] = "strict",
    offline: Annotated[bool, _option("--offline", panel=_INPUT, help="No network at all.")] = False,
    method: Annotated[str | None, _option("--method", panel=_METHOD, help="A name from `tidekv methods`.")] = None,
    selector: Annotated[str | None, _option("--selector", panel=_METHOD, help="Which entries stay.")] = None,
    schedule: Annotated[str | None, _option("--schedule", panel=_METHOD, help="tide or oneshot.")] = None,
    budget_policy: Annotated[str | None, _option("--budget-policy", panel=_METHOD, help="How many, where.")] = None,
    kv_store: Annotated[str | None, _option("--kv-store", panel=_METHOD, help="How they are kept.")] = None,
    budget: Annotated[
        str | None, _option("--budget", panel=_METHOD, help="KV tokens kept per layer, or full, or auto.")
    ] = None,
    parameters: Annotated[
        list[str] | None, _option("--set", panel=_METHOD, help="KEY=VALUE of the selector, e.g. window=32.")
    ] = None,
    chunk_size: Annotated[int | None, _option("--chunk-size", panel=_ENGINE, help="Tokens per chunk (C).")] = None,
    score_block: Annotated[
        int | None, _option("--score-block", panel=_ENGINE, help="Keys scored at a time (b_s).")
    ] = None,
    attention: Annotated[
        str | None, _option("--attention", panel=_ENGINE, help="auto, flash-attn, sdpa or eager.")
    ] = None,
    dtype: Annotated[str | None, _option("--dtype", panel=_ENGINE, help="auto, bfloat16, float16 or float32.")] = None,
    device: Annotated[str | None, _option("--device", panel=_ENGINE, help="auto, cuda[:N] or cpu.")] = None,
    profile: Annotated[str | None, _option("--profile", panel=_ENGINE, help="A profile's name or YAML file.")] = None,
    memory_limit: Annotated[
        str | None, _option("--memory-limit", panel=_ENGINE, help="Plan as if only this were there, e.g. 6GiB.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, _option("-n", "--max-new-tokens", panel=_OUTPUT, help="Tokens to generate at most.")
    ] = None,
    temperature: Annotated[float, _option("--temperature", panel=_OUTPUT, help="0 is greedy (default).")] = 0.0,
    top_p: Annotated[float, _option("--top-p", panel=_OUTPUT, help="Nucleus mass (1).")] = 1.0,
    seed: Annotated[int | None, _option("--seed", panel=_OUTPUT, help="For sampling.")] = None,
    stop: Annotated[list[str] | None, _option("--stop", panel=_OUTPUT, help="End the answer before this text.")] = None,
    as_json: Annotated[bool, _option("--json", panel=_OUTPUT, help="One JSON document on stdout.")] = False,
    no_stream: Annotated[bool, _option("--no-stream", panel=_OUTPUT, help="Print the answer at its end.")] = False,
    kept: Annotated[str | None, _option("--kept", panel=_OUTPUT, help="Write kept positions to FILE.npz.")] = None,
    quiet: Annotated[bool, _option("-q", "--quiet", panel=_OUTPUT, help="Nothing but errors on stderr.")] = False,
    verbose: Annotated[bool, _option("-v", "--verbose", panel=_OUTPUT, help="More on stderr.")] = False,
    dry_run: Annotated[bool, _option("--dry-run", panel=_OUTPUT, help="Report and stop before loading.")] = False,
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
            for key, value in _pairs("--template-arg", template_arg, "enable_thinking=false").items()
        },
        offline=offline,
        encoding=encoding,
        errors=errors,
        json=as_json,
        stream=not no_stream,
        quiet=quiet,
        verbose=verbose,
        dry_run=dry_run,
        parameters=_pairs("--set", parameters, "window=32"),
        kept=kept,
    )
    raise typer.Exit(int(Runner(request, context.obj).run()))


def _pairs(flag: str, entries: list[str] | None, example: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for entry in entries or ():
        key, equals, value = entry.partition("=")
        if not key or not equals:
            raise UsageError(f"{flag} {entry} is no KEY=VALUE", f"write it like {flag} {example}")
        pairs[key.strip()] = value.strip()
    return pairs


def _literal(value: str) -> Any:
    """`true`, numbers and lists as themselves, anything else as text."""
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
