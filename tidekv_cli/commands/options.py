"""The flags that several commands have. Knows no command."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tidekv_cli.errors import UsageError

INPUT, METHOD, ENGINE, OUTPUT = "Input", "Method", "Engine", "Output"


def option(*names: str, panel: str, help: str, **extra: Any) -> Any:
    """One flag in its panel of `--help`, without a default shown: most defaults are the profile's."""
    return typer.Option(*names, rich_help_panel=panel, help=help, show_default=False, **extra)


Model = Annotated[
    str | None, option("-m", "--model", panel=INPUT, help="Alias, hub id, directory, or .gguf file (smollm2-135m).")
]
Offline = Annotated[bool, option("--offline", panel=INPUT, help="No network at all.")]
Method = Annotated[str | None, option("--method", panel=METHOD, help="A name from `tidekv methods` (tidekv-snapkv).")]
Selector = Annotated[
    str | None, option("--selector", panel=METHOD, help="Which entries stay: snapkv, recent, h2o, ... (the method's).")
]
Schedule = Annotated[
    str | None, option("--schedule", panel=METHOD, help="tide, oneshot, chunked or online (the method's).")
]
BudgetPolicy = Annotated[
    str | None,
    option("--budget-policy", panel=METHOD, help="How many, where: uniform, pyramid, ada, cake, ... (the method's)."),
]
KvStore = Annotated[
    str | None, option("--kv-store", panel=METHOD, help="How they are kept: dense, flat or quantized (the method's).")
]
Budget = Annotated[
    str | None, option("--budget", panel=METHOD, help="KV tokens kept per layer, or full, or auto (the profile's).")
]
Parameters = Annotated[
    list[str] | None,
    option("--set", panel=METHOD, help="KEY=VALUE of the method, e.g. window=32; see `tidekv methods`."),
]
ChunkSize = Annotated[int | None, option("--chunk-size", panel=ENGINE, help="Tokens per chunk, C (the profile's).")]
ScoreBlock = Annotated[
    int | None, option("--score-block", panel=ENGINE, help="Keys scored at a time, b_s (the profile's).")
]
Attention = Annotated[
    str | None, option("--attention", panel=ENGINE, help="auto (default), flash-attn, sdpa, efficient, math or eager.")
]
Dtype = Annotated[
    str | None, option("--dtype", panel=ENGINE, help="auto (the profile's), bfloat16, float16 or float32.")
]
Device = Annotated[str | None, option("--device", panel=ENGINE, help="auto (default), cuda[:N] or cpu.")]
Profile = Annotated[
    str | None,
    option("--profile", panel=ENGINE, help="A profile's name or YAML file (the one that matches the device)."),
]
MemoryLimit = Annotated[
    str | None, option("--memory-limit", panel=ENGINE, help="Plan as if only this were there, e.g. 6GiB.")
]
MaxNewTokens = Annotated[
    int | None, option("-n", "--max-new-tokens", panel=OUTPUT, help="Tokens to generate at most (the profile's).")
]
AsJson = Annotated[bool, option("--json", panel=OUTPUT, help="One JSON document on stdout.")]
Quiet = Annotated[bool, option("-q", "--quiet", panel=OUTPUT, help="Nothing but errors on stderr.")]
Verbose = Annotated[bool, option("-v", "--verbose", panel=OUTPUT, help="More on stderr.")]


def pairs(flag: str, entries: list[str] | None, example: str) -> dict[str, str]:
    """KEY=VALUE entries of `flag` as a mapping. Raises `UsageError`."""
    found: dict[str, str] = {}
    for entry in entries or ():
        key, equals, value = entry.partition("=")
        if not key or not equals:
            raise UsageError(f"{flag} {entry} is no KEY=VALUE", f"write it like {flag} {example}")
        found[key.strip()] = value.strip()
    return found
