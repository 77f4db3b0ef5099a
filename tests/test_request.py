"""Settings settle: flag over config file over profile, and what is impossible is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tidekv_cli.errors import UsageError
from tidekv_cli.methods import METHODS
from tidekv_cli.profile import Profile, find_profile
from tidekv_cli.request import TRUNCATIONS, EngineChoice, RunRequest, check_budget, choose_settings

CPU = find_profile("cpu", {})
CUDA = find_profile("generic-cuda", {})


def settle(
    config: dict[str, Any] | None = None, profile: Profile = CPU, device_kind: str = "cpu", **flags: Any
) -> EngineChoice:
    """As the command settles it, the selector built as there."""
    choice = choose_settings(RunRequest(**flags), config or {}, profile, device_kind)
    check_budget(choice, choice.method.selector_info.build(choice.axis_settings).mandatory_tokens)
    return choice


def assert_refused(*words: str, config: dict[str, Any] | None = None, profile: Profile = CPU, **flags: Any) -> None:
    with pytest.raises(UsageError) as caught:
        settle(config, profile, **flags)
    for word in words:
        assert word in f"{caught.value.message} {caught.value.hint}"
    assert caught.value.hint


def test_nothing_given_is_the_profile() -> None:
    choice = settle()
    assert choice.method == METHODS["tidekv-snapkv"]
    assert choice.axis_settings == {"window": 32, "pool": "max", "pool_kernel": 7, "sinks": 0}
    assert (choice.budget, choice.chunk_size, choice.score_block) == (CPU.budget, CPU.chunk_size, CPU.score_block)
    assert (choice.attention[0], choice.dtype) == (CPU.attention[0], CPU.dtype)
    assert choice.max_new_tokens == CPU.max_new_tokens


@pytest.mark.parametrize(
    ("key", "flag", "in_config", "in_profile"),
    [
        ("chunk_size", 11, 22, CPU.chunk_size),
        ("score_block", 11, 22, CPU.score_block),
        ("max_new_tokens", 11, 22, CPU.max_new_tokens),
        ("dtype", "float32", "bfloat16", CPU.dtype),
    ],
)
def test_flag_over_config_over_profile(key: str, flag: object, in_config: object, in_profile: object) -> None:
    assert getattr(settle(), key) == in_profile
    assert getattr(settle({key: in_config}), key) == in_config
    assert getattr(settle({key: in_config}, **{key: flag}), key) == flag
    assert getattr(settle(**{key: flag}), key) == flag


def test_attentions_order() -> None:
    assert settle().wanted_attention == "auto"
    assert settle({"attention": "eager"}).attention == ("eager",)
    assert settle({"attention": "eager"}, attention="sdpa").attention == ("sdpa", "math")


def test_the_budgets_order() -> None:
    assert settle({"budget": 200}).budget == 200
    assert settle({"budget": "300"}).budget == 300
    assert settle({"budget": 200}, budget="400").budget == 400
    assert settle(profile=replace(CPU, budget=77)).budget == 77


def test_the_methods_order() -> None:
    assert settle({"method": "streaming"}).method == METHODS["streaming"]
    assert settle({"method": "streaming"}, method="snapkv").method == METHODS["snapkv"]
    assert settle({"method": "streaming"}, schedule="tide").method == METHODS["tidekv-streaming"]
    assert settle({"method": "streaming"}, selector="snapkv").method.selector == "snapkv"


def test_auto_is_the_profiles_first() -> None:
    assert settle({"attention": "eager"}, attention="auto").attention[0] == CPU.attention[0]
    assert settle({"dtype": "bfloat16"}, dtype="auto").dtype == CPU.dtype
    assert (
        settle(profile=CUDA, device_kind="cuda").attention[0] == "flash-attn"
        and settle(profile=CUDA, device_kind="cuda").dtype == "bfloat16"
    )
    found = settle(profile=CUDA, device_kind="cuda", attention="flash-attn", dtype="float16")
    assert found.attention == ("flash-attn", "sdpa", "efficient", "math") and found.wanted_attention == "flash-attn"


@pytest.mark.parametrize("budget", ["full", "auto"])
def test_budgets_in_words(budget: str) -> None:
    assert settle(budget=budget).budget == budget
    assert settle({"budget": budget}).budget == budget


@pytest.mark.parametrize(
    "budget", ["", "many", "-1", "1.5", "1e3", "0x10", "Full", "²", "1,000", "+64", "50%", "9" * 5000]
)
def test_budgets_that_are_none(budget: str) -> None:
    assert_refused("--budget", budget, "full or auto", budget=budget)
    assert_refused("--budget", budget, "full or auto", config={"budget": budget})


def test_selectors_without_a_budget() -> None:
    assert settle(method="full").budget is None
    assert settle({"budget": 100}, method="tidekv-full").budget is None  # the file's is for methods that have one
    assert settle(selector="all").budget is None
    assert_refused("--budget 100", "all", method="full", budget="100")
    assert_refused("--budget full", "all", method="tidekv-full", budget="full")


@pytest.mark.parametrize(
    ("method", "parameters", "mandatory"),
    [
        ("snapkv", {}, 32),
        ("snapkv", {"window": "8", "sinks": "3"}, 11),
        ("tidekv-snapkv", {"window": "1"}, 1),
        ("tidekv-recent", {}, 1),
        ("tidekv-recent", {"sinks": "5"}, 6),
        ("streaming", {}, 5),
        ("streaming", {"sinks": "0"}, 1),
    ],
)
def test_what_is_always_kept(method: str, parameters: dict[str, str], mandatory: int) -> None:
    assert settle(method=method, parameters=parameters, budget=str(mandatory)).budget == mandatory
    below = str(mandatory - 1)
    assert_refused(f"--budget {below}", str(mandatory), method=method, parameters=parameters, budget=below)


def test_a_budget_from_config_or_profile_must_cover_it_too() -> None:
    assert_refused("--budget 31", "window 32", "sinks 0", config={"budget": 31})
    assert_refused("--budget 10", profile=replace(CPU, budget=10))
    assert_refused("--budget 0", config={"budget": 0})


def test_words_are_not_checked_against_it() -> None:
    for budget in ("full", "auto", None):
        check_budget(replace(settle(), budget=budget), 32)
    check_budget(replace(settle(), budget=5), 5)
    with pytest.raises(UsageError, match="--budget 5 "):
        check_budget(replace(settle(), budget=5), 6)


@pytest.mark.parametrize("key", ["chunk_size", "score_block", "max_new_tokens"])
@pytest.mark.parametrize("value", [0, -1, 1048577, 10**18])
def test_impossible_counts(key: str, value: int) -> None:
    flag = "--" + key.replace("_", "-")
    assert_refused(f"{flag} {value}", "from 1 to 1048576", **{key: value})
    assert_refused(f"{flag} {value}", "from 1 to 1048576", config={key: value})


@pytest.mark.parametrize(
    ("key", "value", "known"),
    [
        ("attention", "magic", "eager"),
        ("dtype", "int8", "bfloat16"),
        ("method", "magic", "tidekv-snapkv"),
    ],
)
def test_unknown_names(key: str, value: str, known: str) -> None:
    assert_refused(value, known, **{key: value})
    assert_refused(value, known, config={key: value})


def test_unknown_axes_and_parameters() -> None:
    for key in ("schedule", "selector", "budget_policy", "kv_store"):
        assert_refused("magic", "--" + key.replace("_", "-"), **{key: "magic"})
    assert_refused("'magic'", "snapkv", "window", parameters={"magic": "1"})
    assert_refused("window=many", parameters={"window": "many"})
    assert_refused("'window'", "streaming", "sinks", method="streaming", parameters={"window": "8"})


@pytest.mark.parametrize("truncate", TRUNCATIONS)
def test_known_truncations(truncate: str) -> None:
    assert settle(truncate=truncate) == settle()


def test_unknown_truncations() -> None:
    assert_refused("--truncate ends", "middle", truncate="ends")


@pytest.mark.parametrize("key", ["prompt", "system"])
def test_text_that_is_none(key: str) -> None:
    assert_refused(f"--{key}", "UTF-8", **{key: "caf\udce9"})
    assert_refused("--stop", "UTF-8", stop=("a", "\udce9"))
    assert_refused("--stop", "empty", stop=("a", ""))
    assert_refused("--template-arg", "UTF-8", template_arguments={"a": "\udce9"})


def test_another_devices_profile_gives_what_this_device_can_do() -> None:
    other = replace(CPU, kind="cuda", attention=("flash-attn", "sdpa", "eager"), dtype="bfloat16")
    assert settle(profile=other).attention == ("sdpa", "math", "eager")
    assert settle(profile=other, device_kind="cuda").attention[:2] == ("flash-attn", "sdpa")
    assert_refused("flash-attn", "CUDA", profile=other, attention="flash-attn")
    assert_refused("float16", "CPU", profile=other, dtype="float16")
    assert_refused("no attention", profile=replace(other, attention=("flash-attn",)))


def test_what_a_cpu_cannot() -> None:
    assert_refused("flash-attn", "CUDA", attention="flash-attn")
    assert_refused("flash-attn", "CUDA", config={"attention": "flash-attn"})
    assert_refused("float16", "CPU", dtype="float16")
    assert_refused("float16", "CPU", config={"dtype": "float16"})
    assert_refused("float16", "CPU", profile=replace(CPU, dtype="float16"))
