"""The names: which point on the axes each method is, and which points there cannot be. Readable without torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tidekv_cli.axes import (
    POLICIES,
    SCHEDULES,
    STORES,
    Parameter,
    PolicyInfo,
    SelectorInfo,
    StoreInfo,
    Value,
    converted,
    selector_info,
    selector_names,
)
from tidekv_cli.errors import UsageError

DEFAULT_METHOD = "tidekv-snapkv"


@dataclass(frozen=True, slots=True)
class Method:
    """A named point on the axes schedule, selector, budget policy and store."""

    name: str
    schedule: str
    selector: str
    budget_policy: str
    kv_store: str
    purpose: str

    @property
    def axes(self) -> tuple[str, str, str, str]:
        """Schedule, selector, policy, store."""
        return self.schedule, self.selector, self.budget_policy, self.kv_store

    @property
    def selector_info(self) -> SelectorInfo:
        """Of the selector, which must be known."""
        info = selector_info(self.selector)
        assert info is not None
        return info

    @property
    def policy_info(self) -> PolicyInfo:
        """Of the budget policy."""
        return POLICIES[self.budget_policy]

    @property
    def store_info(self) -> StoreInfo:
        """Of the store."""
        return STORES[self.kv_store]

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The `--set` keys of all axes."""
        return self.selector_info.parameters + self.policy_info.parameters + self.store_info.parameters

    def settings(self, values: Mapping[str, Any]) -> dict[str, Value]:
        """Defaults with `values` over them, each of its default's type. Raises `UsageError`."""
        known = {parameter.name: parameter for parameter in self.parameters}
        for key in values:
            if key not in known:
                listed = ", ".join(known) or "none"
                raise UsageError(f"method {self.name} has no parameter {key!r}", f"its parameters are: {listed}")
        return {name: converted(one, values.get(name, one.default)) for name, one in known.items()}


def _points(*points: tuple[str, str, str]) -> dict[str, Method]:
    found = {}
    for name, axes, purpose in points:
        schedule, selector, policy, store = axes.split()
        found[name] = Method(name, schedule, selector, policy, store, purpose)
    return found


METHODS = _points(
    ("tidekv-snapkv", "tide snapkv uniform dense", "SnapKV's cache at a fraction of its peak"),
    ("tidekv-pyramidkv", "tide snapkv pyramid dense", "PyramidKV's cache at a fraction of its peak"),
    ("tidekv-adakv", "tide snapkv ada flat", "Ada-KV's cache at a fraction of its peak"),
    ("tidekv-cake", "tide cake cake dense", "CAKE's cache at a fraction of its peak"),
    ("tidekv-h2o", "tide h2o uniform dense", "H2O's cache without a matrix of the whole prompt"),
    ("tidekv-chunkkv", "tide chunkkv uniform dense", "ChunkKV's cache at a fraction of its peak"),
    ("tidekv-keydiff", "tide keydiff uniform dense", "KeyDiff's choice, made once a layer"),
    ("tidekv-kivi", "tide all uniform quantized", "KIVI's cache at a fraction of its peak"),
    ("tidekv-recent", "tide recent uniform dense", "the most recent tokens only"),
    ("tidekv-streaming", "tide streaming uniform dense", "attention sinks and recent tokens"),
    ("tidekv-full", "tide all uniform dense", "layer-major prefill without eviction (Tide-NoEvict)"),
    ("snapkv", "oneshot snapkv uniform dense", "post-prefill baseline, evicts layer by layer"),
    ("pyramidkv", "oneshot snapkv pyramid dense", "post-prefill: early layers keep more"),
    ("adakv", "oneshot snapkv ada flat", "post-prefill: heads keep different numbers, removed physically"),
    ("cake", "oneshot cake cake dense", "post-prefill: layers share by how restless their attention is"),
    ("h2o", "oneshot h2o uniform dense", "post-prefill: heavy hitters and recent tokens, exact sums"),
    ("chunkkv", "oneshot chunkkv uniform dense", "post-prefill: whole runs of tokens"),
    ("streaming", "oneshot streaming uniform dense", "post-prefill: attention sinks and recent tokens"),
    ("kivi", "oneshot all uniform quantized", "everything stays, in few bits"),
    ("full", "oneshot all uniform dense", "plain prefill, full cache"),
    ("full-chunked", "chunked all uniform dense", "token-major chunks, full cache (Full-Chunked)"),
    ("keydiff", "online keydiff uniform dense", "evicts while reading, by how alike keys are"),
    ("block-snapkv", "online snapkv uniform dense", "negative control: SnapKV after every chunk"),
    ("block-recent", "online recent uniform dense", "negative control: recent tokens after every chunk"),
    (
        "streaming-llm",
        "online streaming uniform dense",
        "sinks and recent tokens while reading",
    ),
)


def choose(
    method: str, schedule: str | None, selector: str | None, budget_policy: str | None, kv_store: str | None
) -> Method:
    """The point that `method` with single axes over it means.

    Raises `UsageError` for an unknown name, and for axes that do not go together.
    """
    if method not in METHODS:
        raise UsageError(f"there is no method {method!r}", f"known are {', '.join(METHODS)}")
    base = METHODS[method]
    chosen = Method(
        name=method,
        schedule=_axis("--schedule", schedule, base.schedule, SCHEDULES),
        selector=_axis("--selector", selector, base.selector, selector_names()),
        budget_policy=_axis("--budget-policy", budget_policy, base.budget_policy, POLICIES),
        kv_store=_axis("--kv-store", kv_store, base.kv_store, STORES),
        purpose=base.purpose,
    )
    against = conflict(chosen)
    if against is not None:
        reason, way = against
        raise UsageError(f"{' × '.join(chosen.axes)} is impossible: {reason}", way)
    for same in METHODS.values():  # a point that has a name is called by it
        if same.axes == chosen.axes:
            return same
    return Method(" × ".join(chosen.axes), *chosen.axes, purpose="single axes chosen")


def conflict(method: Method) -> tuple[str, str] | None:
    """Why the axes of `method` do not go together, and a way out; None if they do."""
    selector, policy, store = method.selector_info, method.policy_info, method.store_info
    shares = method.budget_policy != "uniform"
    if method.schedule == "chunked" and selector.budgeted:
        return "schedule chunked evicts nothing", "use --selector all, or another --schedule"
    if method.schedule not in selector.schedules:
        reason = f"selector {selector.name} is not made for schedule {method.schedule}"
        why = f": {selector.unscheduled}" if selector.unscheduled else ""
        return f"{reason}{why}", f"use --schedule {' or '.join(selector.schedules)}"
    if method.schedule == "online" and (policy.ragged or policy.revises):
        return (
            f"policy {policy.name} shares once all of the prompt is read, which schedule online does not wait for",
            "use --schedule tide or oneshot",
        )
    if method.schedule in ("chunked", "online") and method.kv_store != "dense":
        return f"schedule {method.schedule} reads on in its cache, which is dense", "use --kv-store dense"
    if shares and not selector.budgeted:
        return (
            f"selector {selector.name} keeps everything, so there is no budget to share",
            "use --budget-policy uniform",
        )
    if policy.ragged and selector.scores != "head":
        why = "scores no rows" if selector.scores == "none" else "chooses for all heads of a layer together"
        return f"policy {policy.name} shares by each head's scores, and selector {selector.name} {why}", _SCORED
    if policy.revises and not (selector.windowed and selector.scores != "none"):
        return (
            f"policy {policy.name} needs scores from the last queries, which selector {selector.name} has not",
            _SCORED,
        )
    if policy.ragged and not store.ragged:
        return f"heads keep different numbers of rows, which store {store.name} cannot hold", "use --kv-store flat"
    if policy.revises and not store.trims:
        return (
            f"policy {policy.name} trims layers again, which store {store.name} cannot",
            "use --kv-store dense or flat",
        )
    if policy.revises and selector.rolling:
        return (
            f"policy {policy.name} trims layers again, and selector {selector.name} drops rows by their age",
            "use --budget-policy uniform or pyramid",
        )
    if selector.rolling and method.kv_store != "dense":
        return (
            f"selector {selector.name} drops rows while it generates, which only store dense can",
            "use --kv-store dense",
        )
    return None


_SCORED = "use --selector snapkv, or another --budget-policy"


def _axis(flag: str, value: str | None, base: str, allowed: Iterable[str]) -> str:
    if value is None:
        return base
    if value not in allowed:
        raise UsageError(f"{flag} {value} is not known", f"known are {', '.join(allowed)}")
    return value
