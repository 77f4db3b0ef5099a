"""`tidekv profiles [NAME]`: list device profiles, or show one with where each value comes from."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from tidekv_cli.environment import Environment
from tidekv_cli.units import format_bytes

if TYPE_CHECKING:
    from tidekv_cli.profile import Profile


def profiles(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="A profile's name or YAML file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """List device profiles, or show one with where each value comes from."""
    from tidekv_cli.profile import find_profile, list_profiles, profile_document
    from tidekv_cli.report import plain_table

    environment: Environment = context.obj
    environ = environment.environ
    chosen = list(list_profiles(environ).values()) if name is None else [find_profile(name, environ)]
    if as_json:
        document = {"schema": 1, "profiles": [profile_document(profile) for profile in chosen]}
        environment.write(json.dumps(document, ensure_ascii=False) + "\n")
    elif name is None:
        rows = [
            (p.name, p.kind, _amount(p.memory), str(p.chunk_size), str(p.budget), p.dtype, p.description)
            for p in chosen
        ]
        headers = ("profile", "kind", "memory", "chunk", "budget", "dtype", "description")
        environment.write(plain_table(headers, rows))
    else:
        (profile,) = chosen
        rows3 = [(key, value, profile.sources.get(key, "")) for key, value in _values(profile).items()]
        environment.write(plain_table(("key", "value", "source"), rows3) + f"\nfrom {profile.path}\n")


def _values(profile: Profile) -> dict[str, str]:
    """What is shown of each key, the items of `match` and `reserve` each by itself."""
    asked = profile.match
    total = "" if asked.total_mib is None else "{} to {}".format(*asked.total_mib)
    match = {"names": ", ".join(asked.names), "boards": ", ".join(asked.boards), "total_mib": total}
    return {
        "name": profile.name,
        "description": profile.description,
        "kind": profile.kind,
        **{f"match.{key}": value for key, value in match.items() if value},
        "memory": _amount(profile.memory),
        "bandwidth_gb_s": _rate(profile.bandwidth_gb_s, "GB/s"),
        "tflops": _rate(profile.tflops, f"TFLOP/s, dense, {profile.dtype}"),
        "chunk_size": f"{profile.chunk_size} tokens",
        "score_block": f"{profile.score_block} tokens",
        "budget": f"{profile.budget} tokens a layer",
        "attention": ", ".join(profile.attention),
        "dtype": profile.dtype,
        "max_new_tokens": f"{profile.max_new_tokens} tokens",
        "allocator": " ".join(f"{key}={value}" for key, value in profile.allocator.items()) or "nothing set",
        **{f"reserve.{key}": format_bytes(amount) for key, amount in profile.reserve.items()},
    }


def _amount(count: int | None) -> str:
    return "as found" if count is None else format_bytes(count)


def _rate(value: float | None, unit: str) -> str:
    return "unknown" if value is None else f"{value:g} {unit}"
