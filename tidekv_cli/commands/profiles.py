"""`tidekv profiles [NAME]`: list device profiles, or show one with where each value comes from."""

from __future__ import annotations

from typing import Annotated

import typer

from tidekv_cli.environment import Environment
from tidekv_cli.units import format_bytes


def profiles(
    context: typer.Context, name: Annotated[str | None, typer.Argument(help="A profile's name or YAML file.")] = None
) -> None:
    """List device profiles, or show one with where each value comes from."""
    from tidekv_cli.profile import find_profile, list_profiles
    from tidekv_cli.report import plain_table

    environment: Environment = context.obj
    if name is None:
        rows = [
            (p.name, p.kind, str(p.chunk_size), str(p.budget), p.dtype, p.description)
            for p in list_profiles(environment.environ).values()
        ]
        environment.write(plain_table(("profile", "kind", "chunk", "budget", "dtype", "description"), rows))
        return
    profile = find_profile(name, environment.environ)
    values = {
        "name": profile.name,
        "description": profile.description,
        "kind": profile.kind,
        "chunk_size": f"{profile.chunk_size} tokens",
        "score_block": f"{profile.score_block} tokens",
        "budget": f"{profile.budget} tokens a layer",
        "attention": ", ".join(profile.attention),
        "dtype": profile.dtype,
        "max_new_tokens": f"{profile.max_new_tokens} tokens",
        **{f"reserve.{key}": format_bytes(amount) for key, amount in profile.reserve.items()},
    }
    rows3 = [(key, value, profile.sources.get(key, "")) for key, value in values.items()]
    environment.write(plain_table(("key", "value", "source"), rows3) + f"\nfrom {profile.path}\n")
