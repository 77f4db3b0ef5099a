"""Names and metadata agree with the classes they stand for."""

from __future__ import annotations

import dataclasses
import importlib
import re
from typing import Any

import pytest

from tidekv_cli.axes import POLICIES, SCHEDULES, SELECTORS, STORES, Part
from tidekv_cli.errors import UsageError
from tidekv_cli.methods import METHODS, choose

NONE = (None, None, None, None)


def target_of(info: Part) -> type[Any]:
    module, _, name = info.target.partition(":")
    return getattr(importlib.import_module(module), name)


PARTS = [
    *SELECTORS.values(),
    *STORES.values(),
    *{part.target: part for policy in POLICIES.values() for part in (policy.layers, policy.heads)}.values(),
]


@pytest.mark.parametrize("info", PARTS, ids=lambda part: part.target.rpartition(":")[2])
def test_parameters_are_the_fields_of_the_class(info: Part) -> None:
    fields = {field.name: field for field in dataclasses.fields(target_of(info))}
    parameters = {parameter.name: parameter.default for parameter in info.parameters}
    assert list(parameters) == list(fields)
    for name, default in parameters.items():
        assert type(default) is type(fields[name].default)
    assert parameters == {name: field.default for name, field in fields.items()}
    assert all(parameter.meaning for parameter in info.parameters)


@pytest.mark.parametrize("info", PARTS, ids=lambda part: part.target.rpartition(":")[2])
def test_building_with_defaults(info: Part) -> None:
    selector = info.build({})
    assert type(selector) is target_of(info)
    for parameter in info.parameters:
        assert getattr(selector, parameter.name) == parameter.default


def test_streaming_keeps_four_sinks() -> None:
    assert SELECTORS["streaming"].build({}).sinks == 4 and SELECTORS["recent"].build({}).sinks == 0


def test_building_with_values() -> None:
    selector = SELECTORS["snapkv"].build({"window": "16", "pool": "avg", "pool_kernel": 5, "sinks": "2"})
    assert (selector.window, selector.pool, selector.pool_kernel, selector.sinks) == (16, "avg", 5, 2)


@pytest.mark.parametrize(
    "values", [{"window": "0"}, {"sinks": "-1"}, {"pool": "median"}, {"pool_kernel": "4"}, {"pool_kernel": "0"}]
)
def test_the_class_refuses_impossible_values(values: dict[str, str]) -> None:
    with pytest.raises(UsageError) as caught:
        SELECTORS["snapkv"].build(values)
    ((name, value),) = values.items()
    assert f"{name}={value}" in caught.value.message


def test_settings_are_numbers_where_the_default_is_one() -> None:
    settings = METHODS["snapkv"].settings({"window": " 64 ", "pool": 7})
    assert settings == {"window": 64, "pool": "7", "pool_kernel": 7, "sinks": 0}
    assert METHODS["full"].settings({}) == {}


@pytest.mark.parametrize("value", ["many", "1.5", "", "0x10", "1e2"])
def test_settings_that_are_no_numbers(value: str) -> None:
    with pytest.raises(UsageError, match="no whole number") as caught:
        METHODS["snapkv"].settings({"window": value})
    assert f"window={value}" in caught.value.message and caught.value.hint


@pytest.mark.parametrize(
    ("method", "key", "known"),
    [
        ("snapkv", "windows", "window"),
        ("block-recent", "window", "sinks"),
        ("full", "x", "none"),
        ("kivi", "x", "bits"),
    ],
)
def test_unknown_parameters(method: str, key: str, known: str) -> None:
    with pytest.raises(UsageError, match="no parameter") as caught:
        METHODS[method].settings({key: "1"})
    assert repr(key) in caught.value.message and method in caught.value.message and known in caught.value.hint


def test_every_method_is_a_point_on_known_axes() -> None:
    points = [(m.schedule, m.selector, m.budget_policy, m.kv_store) for m in METHODS.values()]
    assert len(set(points)) == len(points)
    for name, method in METHODS.items():
        assert method.name == name and method.purpose
        assert method.schedule in SCHEDULES and method.selector in SELECTORS
        assert method.budget_policy in POLICIES and method.kv_store in STORES
        assert name.startswith("tidekv-") == (method.schedule == "tide")


@pytest.mark.parametrize("name", METHODS)
def test_a_method_by_its_name(name: str) -> None:
    assert choose(name, *NONE) == METHODS[name]


@pytest.mark.parametrize("name", METHODS)
def test_a_method_with_its_own_axes_spelled_out(name: str) -> None:
    m = METHODS[name]
    assert choose(name, m.schedule, m.selector, m.budget_policy, m.kv_store) == m


def test_single_axes_that_make_another_named_method() -> None:
    assert choose("tidekv-snapkv", "oneshot", None, None, None) == METHODS["snapkv"]
    assert choose("full", "tide", None, None, None) == METHODS["tidekv-full"]
    assert choose("snapkv", "tide", "recent", "uniform", "dense") == METHODS["tidekv-recent"]


def test_a_point_without_a_name() -> None:
    method = choose("snapkv", None, "recent", None, None)
    assert (method.schedule, method.selector, method.budget_policy, method.kv_store) == (
        "oneshot",
        "recent",
        "uniform",
        "dense",
    )
    assert method.name == "oneshot × recent × uniform × dense" and method.name not in METHODS
    assert choose("full", None, "recent", None, None) == method


@pytest.mark.parametrize("name", ["nonsense", "", "SnapKV", "tide"])
def test_unknown_methods(name: str) -> None:
    with pytest.raises(UsageError, match="no method") as caught:
        choose(name, *NONE)
    assert repr(name) in caught.value.message and "tidekv-snapkv" in caught.value.hint


@pytest.mark.parametrize(
    ("position", "flag", "known"),
    [
        (0, "--schedule", "tide"),
        (1, "--selector", "snapkv"),
        (2, "--budget-policy", "uniform"),
        (3, "--kv-store", "dense"),
    ],
)
def test_unknown_axes(position: int, flag: str, known: str) -> None:
    axes = [None, None, None, None]
    axes[position] = "nonsense"
    with pytest.raises(UsageError, match="nonsense") as caught:
        choose("snapkv", *axes)
    assert flag in caught.value.message and known in caught.value.hint


@pytest.mark.parametrize(
    ("method", "setting", "word"),
    [
        ("tidekv-snapkv", "window=99999999999999999999999", "is impossible"),
        ("tidekv-streaming", "sinks=99999999999999", "is impossible"),
        ("kivi", "residual=1099511627776", "is impossible"),
        ("tidekv-cake", "gamma=1e39", "gamma"),
        ("tidekv-cake", "gamma=nan", "gamma"),
        ("tidekv-cake", "tau1=1e-320", "tau1"),
        ("tidekv-cake", "tau2=inf", "tau2"),
        ("tidekv-adakv", "alpha=nan", "alpha"),
        ("tidekv-pyramidkv", "beta=0", "beta"),
        ("tidekv-h2o", "recent=nan", "recent"),
        ("kivi", "bits=3", "bits"),
        ("kivi", "group=0", "group"),
        ("tidekv-streaming", "positions=relative", "positions"),
    ],
)
def test_parameters_that_cannot_be(method: str, setting: str, word: str) -> None:
    name, _, value = setting.partition("=")
    chosen = METHODS[method]
    with pytest.raises(UsageError, match=word):
        values = chosen.settings({name: value})
        for part in (chosen.selector_info, chosen.policy_info.layers, chosen.policy_info.heads, chosen.store_info):
            part.build(values)


def test_a_target_that_is_not_there() -> None:
    for target in ("nowhere.mod:X", "tidekv_cli.axes:Nothing", "nowhere"):
        with pytest.raises(UsageError, match="cannot be had from"):
            Part("x", target, "").build({})


def test_no_two_axes_have_a_parameter_of_one_name() -> None:
    """`--set` names a parameter, not its axis."""
    axes = [
        {parameter.name for part in axis.values() for parameter in part.parameters}
        for axis in (SELECTORS, POLICIES, STORES)
    ]
    assert sum(map(len, axes)) == len(set.union(*axes))


def test_what_is_from_no_paper_says_what_it_is() -> None:
    for part in (*SELECTORS.values(), *POLICIES.values(), *STORES.values()):
        assert part.source or part.purpose, part.name
        assert not part.source or re.search(r"20\d\d$", part.source), part.source


def test_policies_are_what_they_say() -> None:
    for info in POLICIES.values():
        assert info.revises == target_of(info.layers).revises and info.ragged == target_of(info.heads).ragged


def test_residuals_have_an_end() -> None:
    for setting in (
        {"residual": 0, "group": 1},
        {"residual": 8192},
        {"group": 1, "residual": (1 << 30) - 1},
        {"group": 8192, "residual": 8192},
    ):
        with pytest.raises(UsageError, match="is impossible"):
            STORES["quantized"].build(setting)
