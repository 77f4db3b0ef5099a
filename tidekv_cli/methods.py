"""The names: which point on the axes each method is, and what selectors there are. Readable without torch."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tidekv_cli.errors import UsageError

SCHEDULES = ("tide", "oneshot")
POLICIES = ("uniform",)
STORES = ("dense",)
_KIND_NAMES = {int: "whole number", float: "number", str: "text"}
DEFAULT_METHOD = "tidekv-snapkv"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One `--set` key of a selector."""

    name: str
    default: int | float | str
    meaning: str


@dataclass(frozen=True, slots=True)
class SelectorInfo:
    """A selector's metadata; `target` is its "module:Class". `budgeted` is False where a budget means nothing."""

    name: str
    target: str
    source: str
    parameters: tuple[Parameter, ...] = ()
    budgeted: bool = True

    def build(self, values: Mapping[str, Any]) -> Any:
        """The selector object with `values` over its defaults (imports torch)."""
        module, _, name = self.target.partition(":")
        return getattr(importlib.import_module(module), name)(**self.settings(values))

    def settings(self, values: Mapping[str, Any]) -> dict[str, int | float | str]:
        """Defaults with `values` over them, each of its default's type. Raises `UsageError`."""
        known = {parameter.name: parameter for parameter in self.parameters}
        settings = {name: parameter.default for name, parameter in known.items()}
        for key, value in values.items():
            if key not in known:
                listed = ", ".join(known) or "none"
                raise UsageError(f"selector {self.name} has no parameter {key!r}", f"its parameters are: {listed}")
            settings[key] = _converted(self.name, known[key], value)
        return settings


def _converted(selector: str, parameter: Parameter, value: Any) -> int | float | str:
    kind = type(parameter.default)
    try:
        return kind(value)
    except ValueError as error:
        raise UsageError(
            f"{parameter.name}={value} of selector {selector} is no {_KIND_NAMES[kind]}", f"it is {parameter.meaning}"
        ) from error


SELECTORS = {
    info.name: info
    for info in (
        SelectorInfo(
            "snapkv",
            "tidekv_cli.engine.selectors.snapkv:SnapKV",
            "Li et al., SnapKV, 2024",
            (
                Parameter("window", 32, "last queries that score the keys"),
                Parameter("pool", "max", "avg or max"),
                Parameter("pool_kernel", 7, "keys pooled together, odd"),
                Parameter("sinks", 0, "first tokens always kept"),
            ),
        ),
        SelectorInfo(
            "recent",
            "tidekv_cli.engine.selectors.recent:Recent",
            "sliding control",
            (Parameter("sinks", 0, "first tokens always kept"),),
        ),
        SelectorInfo(
            "streaming",
            "tidekv_cli.engine.selectors.recent:Recent",
            "Xiao et al., StreamingLLM, 2024",
            (Parameter("sinks", 4, "first tokens always kept"),),
        ),
        SelectorInfo("all", "tidekv_cli.engine.selectors.keep_all:KeepAll", "control: no eviction", budgeted=False),
    )
}


@dataclass(frozen=True, slots=True)
class Method:
    """A named point on the axes schedule, selector, budget policy and store."""

    name: str
    schedule: str
    selector: str
    budget_policy: str
    kv_store: str
    purpose: str


METHODS = {
    method.name: method
    for method in (
        Method("tidekv-snapkv", "tide", "snapkv", "uniform", "dense", "SnapKV's cache at a fraction of its peak"),
        Method("tidekv-recent", "tide", "recent", "uniform", "dense", "the most recent tokens only"),
        Method("tidekv-streaming", "tide", "streaming", "uniform", "dense", "attention sinks and recent tokens"),
        Method("tidekv-full", "tide", "all", "uniform", "dense", "layer-major prefill without eviction"),
        Method("snapkv", "oneshot", "snapkv", "uniform", "dense", "post-prefill baseline, evicts layer by layer"),
        Method("streaming", "oneshot", "streaming", "uniform", "dense", "post-prefill baseline"),
        Method("full", "oneshot", "all", "uniform", "dense", "plain prefill, full cache"),
    )
}


def choose(
    method: str, schedule: str | None, selector: str | None, budget_policy: str | None, kv_store: str | None
) -> Method:
    """The point that `method` with single axes over it means. Raises `UsageError` for an unknown name."""
    if method not in METHODS:
        raise UsageError(f"there is no method {method!r}", f"known are {', '.join(METHODS)}")
    base = METHODS[method]
    chosen = Method(
        name=method,
        schedule=_axis("--schedule", schedule, base.schedule, SCHEDULES),
        selector=_axis("--selector", selector, base.selector, tuple(SELECTORS)),
        budget_policy=_axis("--budget-policy", budget_policy, base.budget_policy, POLICIES),
        kv_store=_axis("--kv-store", kv_store, base.kv_store, STORES),
        purpose=base.purpose,
    )
    for same in METHODS.values():  # a point that has a name is called by it
        if _axes(same) == _axes(chosen):
            return same
    return chosen if _axes(chosen) == _axes(base) else _renamed(chosen)


def _axes(method: Method) -> tuple[str, str, str, str]:
    return method.schedule, method.selector, method.budget_policy, method.kv_store


def _renamed(method: Method) -> Method:
    axes = _axes(method)
    return Method(" × ".join(axes), *axes, purpose="single axes chosen")


def _axis(flag: str, value: str | None, base: str, allowed: tuple[str, ...]) -> str:
    if value is None:
        return base
    if value not in allowed:
        raise UsageError(f"{flag} {value} is not known", f"known are {', '.join(allowed)}")
    return value
