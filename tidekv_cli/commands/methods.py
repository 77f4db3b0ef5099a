"""`tidekv methods`: every method with its axes, what it is after, and its source."""

from __future__ import annotations

import typer

from tidekv_cli.environment import Environment
from tidekv_cli.methods import METHODS, SELECTORS


def methods(context: typer.Context) -> None:
    """List the methods and the selectors with their --set parameters."""
    from tidekv_cli.report import plain_table

    environment: Environment = context.obj
    points = [(m.name, m.schedule, m.selector, m.budget_policy, m.kv_store, m.purpose) for m in METHODS.values()]
    environment.write(plain_table(("method", "schedule", "selector", "policy", "store", "what it is"), points))
    rows = [
        (info.name, info.source, ", ".join(f"{p.name}={p.default} ({p.meaning})" for p in info.parameters) or "none")
        for info in SELECTORS.values()
    ]
    environment.write("\n" + plain_table(("selector", "source", "parameters of --set"), rows))
