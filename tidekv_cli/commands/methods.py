"""`tidekv methods`: every method with its axes and purpose, and what there is on each axis."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from tidekv_cli.axes import POLICIES, SCHEDULES, STORES, Parameter, Part, PolicyInfo, selector_infos
from tidekv_cli.environment import Environment
from tidekv_cli.methods import METHODS, Method


def methods(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """List the methods, and the selectors, budget policies and stores with their --set parameters."""
    from tidekv_cli.report import Reporter, plain_table

    environment: Environment = context.obj
    selectors, failures = selector_infos()
    axes: dict[str, list[Any]] = {
        "selector": selectors,
        "budget policy": list(POLICIES.values()),
        "store": list(STORES.values()),
    }
    if as_json:
        document = {
            "schema": 1,
            "methods": [_method(name) for name in METHODS],
            "schedules": SCHEDULES,
            **{
                key: [_document(info) for info in axes[axis]]
                for key, axis in (("selectors", "selector"), ("budget_policies", "budget policy"), ("stores", "store"))
            },
            "notes": failures,
        }
        environment.write(json.dumps(document, ensure_ascii=False) + "\n")
        return
    points = [(m.name, *m.axes, m.purpose, "; ".join(_sources(m)) or "-") for m in METHODS.values()]
    head = ("method", "schedule", "selector", "policy", "store", "what it is", "source")
    environment.write(plain_table(head, points))
    environment.write("\n" + plain_table(("schedule", "what it does"), list(SCHEDULES.items())))
    for axis, infos in axes.items():
        rows = [(info.name, info.source or info.purpose, _listed(info.parameters)) for info in infos]
        environment.write("\n" + plain_table((axis, "source, or what it is", "parameters of --set"), rows))
    reporter = Reporter(environment)
    for failure in failures:
        reporter.warning(failure)


def _listed(parameters: Iterable[Parameter]) -> str:
    return ", ".join(f"{p.name}={p.default} ({p.meaning})" for p in parameters) or "none"


def _method(name: str) -> dict[str, Any]:
    method = METHODS[name]
    keys = ("schedule", "selector", "budget_policy", "kv_store")
    return {
        "name": name,
        **dict(zip(keys, method.axes, strict=True)),
        "purpose": method.purpose,
        "sources": _sources(method),
    }


def _sources(method: Method) -> list[str]:
    infos = method.selector_info, method.policy_info, method.store_info
    return list(dict.fromkeys(info.source for info in infos if info.source))


def _document(info: Part | PolicyInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "source": info.source or None,
        "purpose": info.purpose or None,
        "parameters": [{"name": p.name, "default": p.default, "meaning": p.meaning} for p in info.parameters],
    }
