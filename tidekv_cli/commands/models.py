"""`tidekv models list / pull / path`: aliases, where each comes from, what is on disk."""

from __future__ import annotations

from typing import Annotated

import typer

from tidekv_cli.catalog import ALIASES, DEFAULT_MODEL, HUB_ALIASES, HubAlias, ModelAlias
from tidekv_cli.environment import Environment
from tidekv_cli.errors import ModelError

models = typer.Typer(help="Model aliases: list, fetch, find.", no_args_is_help=True)


@models.command("list")
def list_models(context: typer.Context) -> None:
    """List the aliases, where each comes from, and whether it is on disk."""
    from tidekv_cli.report import plain_table
    from tidekv_cli.sources import path_on_disk

    environment: Environment = context.obj
    rows = []
    aliases: list[ModelAlias | HubAlias] = [*ALIASES.values(), *HUB_ALIASES.values()]
    for alias in aliases:
        default = " (default)" if alias.name == DEFAULT_MODEL else ""
        where = str(path_on_disk(alias, environment.environ) or "not fetched")
        rows.append((alias.name + default, alias.description, alias.license, alias.origin, where))
    environment.write(plain_table(("alias", "model", "license", "source", "on disk"), rows))


@models.command("pull")
def pull_model(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="The alias.")] = DEFAULT_MODEL,
    again: Annotated[bool, typer.Option("--again", help="Fetch even if it is on disk.")] = False,
) -> None:
    """Fetch an alias's files unless they are on disk; print where they are."""
    from tidekv_cli.report import Reporter
    from tidekv_cli.sources import pull

    environment: Environment = context.obj
    alias = ALIASES.get(name) or HUB_ALIASES.get(name)
    if alias is None:
        raise ModelError(f"there is no alias {name!r}", f"known are {', '.join([*ALIASES, *HUB_ALIASES])}")
    note = Reporter(environment).note
    environment.write(f"{pull(alias, environment.environ, note, again)}\n")


@models.command("path")
def model_path(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="Alias, path or hub id; as for `run` if left out.")] = None,
) -> None:
    """Print the file or directory that is loaded; fetches nothing."""
    from tidekv_cli.settings import load_settings
    from tidekv_cli.sources import resolve_model

    environment: Environment = context.obj
    if name is None:
        name = str(load_settings(environment.environ).get("model", DEFAULT_MODEL))
    environment.write(f"{resolve_model(name, environment.environ, offline=True).path}\n")
