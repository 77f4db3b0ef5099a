"""What there is on the axes selector, budget policy and store, with parameters and limits. Readable without torch."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from tidekv_cli.errors import TideError, UsageError, is_out_of_memory

SCHEDULES = {
    "tide": "layer by layer in chunks; a layer is evicted when all of the prompt went through it",
    "oneshot": "the whole prompt at once; a layer is evicted right after its attention",
    "chunked": "chunk by chunk through all layers; nothing is evicted",
    "online": "chunk by chunk through all layers; each is evicted after every chunk",
}
_MOST = 1 << 30
_GROUP = "tidekv.selectors"  # of entry points
_KIND_NAMES = {int: "whole number", float: "number", str: "text"}
_SCORES = ("head", "layer", "none")
Value = int | float | str


@dataclass(frozen=True, slots=True)
class Parameter:
    """One `--set` key."""

    name: str
    default: Value
    meaning: str


@dataclass(frozen=True, slots=True)
class Part:
    """Something with parameters that an object is made of; `target` is its "module:Class".

    `source` is the paper that it is from, empty where it is from none; `purpose` says what it is then.
    """

    name: str
    target: str
    source: str = ""
    parameters: tuple[Parameter, ...] = ()
    purpose: str = ""

    def build(self, values: Mapping[str, Any]) -> Any:
        """The object, with its own of `values` over the defaults (imports torch). Raises `UsageError`."""
        module, _, name = self.target.partition(":")
        settings = {p.name: converted(p, values.get(p.name, p.default)) for p in self.parameters}
        try:
            return getattr(importlib.import_module(module), name)(**settings)
        except TideError:
            raise
        except Exception as error:  # another package's code may raise anything
            if is_out_of_memory(error):
                raise
            raise self.unusable(f"{type(error).__name__}: {error}") from error

    def unusable(self, why: str) -> UsageError:
        """The error for a part that is not what it should be."""
        return UsageError(
            f"{self.name} cannot be had from {self.target}: {why}", "repair or remove the package that offers it"
        )


def converted(parameter: Parameter, value: Any) -> Value:
    """`value` as the type of the parameter's default. Raises `UsageError`."""
    kind = type(parameter.default)
    try:
        found = kind(value)
    except ValueError as error:
        raise UsageError(f"{parameter.name}={value} is no {_KIND_NAMES[kind]}", f"it is {parameter.meaning}") from error
    if isinstance(found, int) and abs(found) > _MOST:
        raise UsageError(f"{parameter.name}={found} is impossible", f"it is {parameter.meaning}")
    return found


@dataclass(frozen=True, slots=True)
class SelectorInfo(Part):
    """A selector. `budgeted` is False where a budget means nothing.

    `scores` says whether rows have scores: `head` for each head its own, `layer` one for all heads, or `none`.
    `windowed` if it looks at the prompt's last queries, `rolling` if it drops rows while tokens are generated.
    `schedules` are those that it can be used with, and `unscheduled` says why with no others.
    """

    budgeted: bool = True
    scores: str = "none"
    windowed: bool = False
    rolling: bool = False
    schedules: tuple[str, ...] = ("tide", "oneshot", "online")
    unscheduled: str = ""

    def build(self, values: Mapping[str, Any]) -> Any:
        """See `Part.build`. What is made must be what this says of it."""
        from tidekv_cli.engine.selectors import Selector

        made = Part.build(self, values)
        if Selector not in type(made).__mro__:
            raise self.unusable(f"{type(made).__name__} is no Selector")
        if (made.rolling is not None) != self.rolling:
            raise self.unusable(f"its rolling is {made.rolling}, and rolling is {self.rolling}")
        return made


@dataclass(frozen=True, slots=True)
class PolicyInfo:
    """A budget policy: how layers share, and how the heads of a layer do.

    It `revises` if a layer's budget may fall once later ones are read, and is `ragged` if heads may keep different
    numbers of rows; both by scores.
    """

    name: str
    layers: Part
    heads: Part
    revises: bool = False
    ragged: bool = False

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Of both."""
        return self.layers.parameters + self.heads.parameters

    @property
    def source(self) -> str:
        """Of both."""
        return "; ".join(dict.fromkeys(part.source for part in (self.layers, self.heads) if part.source))

    @property
    def purpose(self) -> str:
        """Of both."""
        return "; ".join(dict.fromkeys(part.purpose for part in (self.layers, self.heads) if part.purpose))


@dataclass(frozen=True, slots=True)
class StoreInfo(Part):
    """A store. `ragged` if heads may keep different numbers of rows, `trims` if a layer can be trimmed again."""

    ragged: bool = False
    trims: bool = True


_WINDOW = Parameter("window", 32, "last queries that score the keys")
_SINKS = Parameter("sinks", 0, "first tokens always kept")
_SELECTORS = "tidekv_cli.engine.selectors"
SELECTORS = {
    info.name: info
    for info in (
        SelectorInfo(
            "snapkv",
            f"{_SELECTORS}.snapkv:SnapKV",
            "Li et al., SnapKV, 2024",
            (
                _WINDOW,
                Parameter("pool", "max", "avg or max"),
                Parameter("pool_kernel", 7, "keys pooled together, odd, at most 1023"),
                _SINKS,
            ),
            scores="head",
            windowed=True,
        ),
        SelectorInfo(
            "recent", f"{_SELECTORS}.recent:Recent", parameters=(_SINKS,), purpose="control: a sliding window"
        ),
        SelectorInfo(
            "streaming",
            f"{_SELECTORS}.streaming:Streaming",
            "Xiao et al., StreamingLLM, 2024",
            (
                Parameter("sinks", 4, "first tokens always kept"),
                Parameter("positions", "absolute", "absolute, or slot: numbered by their place in the cache"),
            ),
            rolling=True,
        ),
        SelectorInfo(
            "chunkkv",
            f"{_SELECTORS}.chunkkv:ChunkKV",
            "Liu et al., ChunkKV, 2025",
            (_WINDOW, Parameter("run", 20, "tokens that are kept or evicted together")),
            scores="layer",
            windowed=True,
            schedules=("tide", "oneshot"),
            unscheduled="it needs runs of neighbours, which schedule online takes apart",
        ),
        SelectorInfo("keydiff", f"{_SELECTORS}.keydiff:KeyDiff", "Park et al., KeyDiff, 2025", scores="head"),
        SelectorInfo(
            "h2o",
            f"{_SELECTORS}.h2o:H2O",
            "Zhang et al., H2O, 2023",
            (Parameter("recent", 0.5, "part of the budget that is the most recent tokens"),),
            scores="head",
            schedules=("tide", "oneshot"),
            unscheduled="it needs the queries of the whole prompt in each layer",
        ),
        SelectorInfo(
            "cake",
            f"{_SELECTORS}.cake:CakeScore",
            "Qin et al., CAKE, 2025",
            (
                _WINDOW,
                Parameter("gamma", 200.0, "weight of the variance over the window"),
                Parameter("pool_kernel", 5, "keys pooled together, odd, at most 1023"),
            ),
            scores="head",
            windowed=True,
        ),
        SelectorInfo(
            "all",
            f"{_SELECTORS}.keep_all:KeepAll",
            purpose="control: no eviction",
            budgeted=False,
            schedules=("tide", "oneshot", "chunked"),
            unscheduled="it evicts nothing, and schedule online evicts as it reads",
        ),
    )
}

_BUDGETS = "tidekv_cli.engine.budgets"
_EVEN_LAYERS = Part("even", f"{_BUDGETS}.uniform:EvenLayers", purpose="every layer as many")
_EVEN_HEADS = Part("even", f"{_BUDGETS}.uniform:EvenHeads", purpose="every head as many")
_PYRAMID = Part(
    "pyramid",
    f"{_BUDGETS}.pyramid:Pyramid",
    "Cai et al., PyramidKV, 2024",
    (Parameter("beta", 20, "the last layer gets a beta-th of the mean"),),
)
_CAKE = Part(
    "cake",
    f"{_BUDGETS}.cake:Cake",
    "Qin et al., CAKE, 2025",
    (
        Parameter("tau1", 1.6, "entropy to the power 1 / tau1"),
        Parameter("tau2", 0.4, "variance to the power 1 / tau2"),
    ),
)
_ADA = Part(
    "ada",
    f"{_BUDGETS}.ada:AdaHeads",
    "Feng et al., Ada-KV, 2024",
    (Parameter("alpha", 0.2, "part of every head's budget that is the mean"),),
)
POLICIES = {
    info.name: info
    for info in (
        PolicyInfo("uniform", _EVEN_LAYERS, _EVEN_HEADS),
        PolicyInfo("pyramid", _PYRAMID, _EVEN_HEADS),
        PolicyInfo("cake", _CAKE, _EVEN_HEADS, revises=True),
        PolicyInfo("ada", _EVEN_LAYERS, _ADA, ragged=True),
        PolicyInfo("ada-pyramid", _PYRAMID, _ADA, ragged=True),
        PolicyInfo("ada-cake", _CAKE, _ADA, revises=True, ragged=True),
    )
}

_STORES = "tidekv_cli.engine.stores"
STORES = {
    info.name: info
    for info in (
        StoreInfo("dense", f"{_STORES}.dense:Dense", purpose="rows of all heads in one tensor"),
        StoreInfo("flat", f"{_STORES}.flat:Flat", purpose="each head as many rows as it keeps", ragged=True),
        StoreInfo(
            "quantized",
            f"{_STORES}.quantized:Quantized",
            "Liu et al., KIVI, 2024",
            (
                Parameter("bits", 4, "2, 4 or 8"),
                Parameter("group", 32, "numbers that share a scale"),
                Parameter("residual", 128, "newest tokens in full precision"),
            ),
            trims=False,
        ),
    )
}


def selector_info(name: str) -> SelectorInfo | None:
    """The selector called `name`, of this package or an installed one; None if there is none.

    Raises `UsageError` where another package offers it and cannot be used.
    """
    if name in SELECTORS:
        return SELECTORS[name]
    point = next((point for point in _offered() if point.name == name), None)
    found = None if point is None else _loaded(point)
    if isinstance(found, str):
        raise UsageError(found, "repair or remove the package that offers it")
    return found


def selector_names() -> list[str]:
    """Of this package, then of others."""
    return [*SELECTORS, *dict.fromkeys(point.name for point in _offered())]


def selector_infos() -> tuple[list[SelectorInfo], list[str]]:
    """All that can be used, and what is wrong with others."""
    found, failures = list(SELECTORS.values()), []
    for point in _offered():
        loaded = _loaded(point)
        if isinstance(loaded, str):
            failures.append(loaded)
        else:
            found.append(loaded)
    return found, failures


def _offered() -> list[EntryPoint]:
    """By other packages; one that has a name of this package's is not seen."""
    return list(_installed(tuple(sys.path)))


@cache
def _installed(_path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Found by a search of all that is installed, so once for each path."""
    return tuple(point for point in entry_points(group=_GROUP) if point.name not in SELECTORS)


def _loaded(point: EntryPoint) -> SelectorInfo | str:
    """What another package offers, or what is wrong with it."""
    what = f"selector {point.name} of {point.value}"
    others = {other.value for other in _offered() if other.name == point.name} - {point.value}
    if others:
        return f"{what} has the name of another, of {', '.join(sorted(others))}"
    try:
        info = point.load()
        if not isinstance(info, SelectorInfo) or info.name != point.name:
            return f"{what} is no SelectorInfo of that name"
        fault = _fault(info)
    except Exception as error:  # another package's code may raise anything
        return f"{what} cannot be loaded: {type(error).__name__}: {error}"
    return info if fault is None else f"{what} {fault}"


def _fault(info: SelectorInfo) -> str | None:
    """What is wrong with a selector that another package offers; None if nothing is."""
    words = (info.name, info.target, info.source, info.purpose, info.unscheduled)
    if not all(isinstance(text, str) for text in (*words, *(one.meaning for one in info.parameters))):
        return "has something else than text for its name, target, source, purpose, reason or a meaning"
    taken = {one.name for axis in (POLICIES, STORES) for other in axis.values() for one in other.parameters}
    for parameter in info.parameters:
        if type(parameter.default) not in _KIND_NAMES:
            kinds = ", ".join(_KIND_NAMES.values())
            return f"has a parameter {parameter.name} whose default {parameter.default!r} is none of {kinds}"
        if parameter.name in taken:
            return f"has a parameter {parameter.name}, which is another's already"
        taken.add(parameter.name)
    if info.scores not in _SCORES:
        return f"has scores {info.scores!r}, which is none of {', '.join(_SCORES)}"
    if not info.schedules or not set(info.schedules) <= set(SCHEDULES):
        return f"has schedules {info.schedules!r}, which are not of {', '.join(SCHEDULES)}"
    return None
