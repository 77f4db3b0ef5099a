"""The order of attention backends, what refuses them, and what is said of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.planning import llama_8b
from tidekv_cli.attention_choice import choose_attention, wished_attention
from tidekv_cli.errors import DeviceError, UsageError
from tidekv_cli.model_spec import Traits, spec_from_config
from tidekv_cli.profile import load_profile

PROFILES = Path(__file__).parent.parent / "profiles"
CARD, CPU = load_profile(PROFILES / "rtx-4090.yaml"), load_profile(PROFILES / "cpu.yaml")
SPEC = spec_from_config(llama_8b(), "test")
NOT_INSTALLED = "No module named 'flash_attn'"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("auto", ("flash-attn", "sdpa", "efficient", "math", "eager")),
        ("flash-attn", ("flash-attn", "sdpa", "efficient", "math")),
        ("sdpa", ("sdpa", "efficient", "math")),
        ("efficient", ("efficient", "math")),
        ("math", ("math",)),
        ("eager", ("eager",)),
    ],
)
def test_the_order_on_a_card(value: str, expected: tuple[str, ...]) -> None:
    assert wished_attention(value, CARD, "cuda") == expected


def test_the_profiles_order_counts() -> None:
    profile = replace(CARD, attention=("eager", "flash-attn"))
    assert wished_attention("auto", profile, "jetson") == ("eager", "flash-attn")


def test_the_order_on_a_cpu() -> None:
    assert wished_attention("auto", CPU, "cpu") == ("sdpa", "math", "eager")
    assert wished_attention("auto", CARD, "cpu") == ("sdpa", "math", "eager")
    assert wished_attention("math", CPU, "cpu") == ("math",)
    for name in ("flash-attn", "efficient"):
        with pytest.raises(UsageError, match="CUDA"):
            wished_attention(name, CPU, "cpu")


def chosen(
    value: str, faults: dict[str, str], dtype: str = "bfloat16", head_dim: int = 128
) -> tuple[str, tuple[str, ...]]:
    wished = wished_attention(value, CARD, "cuda")
    found = choose_attention(wished, value, "cuda", dtype, replace(SPEC, head_dim=head_dim), faults.get)
    return found.name, found.warnings


def test_the_first_that_works() -> None:
    assert chosen("auto", {}) == ("flash-attn", ())
    assert chosen("auto", {"flash-attn": NOT_INSTALLED}) == ("sdpa", ()), "most have it not, and miss nothing"
    name, (warning,) = chosen("auto", {"flash-attn": "no kernel image"})
    assert name == "sdpa" and "flash-attn" in warning and "no kernel image" in warning
    name, warnings = chosen("auto", {"flash-attn": NOT_INSTALLED, "sdpa": "sm75", "efficient": "its result is off"})
    assert name == "math" and len(warnings) == 2


def test_what_was_asked_for_by_name_is_told_of() -> None:
    name, (warning,) = chosen("flash-attn", {"flash-attn": NOT_INSTALLED})
    assert name == "sdpa" and NOT_INSTALLED in warning and "sdpa is" in warning


def test_dtypes_and_head_sizes_that_a_kernel_refuses_fall_through() -> None:
    name, warnings = chosen("auto", {}, dtype="float32")
    assert name == "efficient" and len(warnings) == 2 and all("float32" in warning for warning in warnings)
    assert chosen("auto", {}, head_dim=512)[0] == "efficient"
    name, warnings = chosen("auto", {}, head_dim=84)
    assert name == "math" and all("84" in warning for warning in warnings)


def test_layers_that_the_kernel_does_not_do_are_told_of() -> None:
    wished = wished_attention("sdpa", CARD, "cuda")

    def warnings(**traits: Any) -> tuple[str, ...]:
        spec = replace(SPEC, traits=Traits(**traits))
        return choose_attention(wished, "sdpa", "cuda", "bfloat16", spec, lambda name: None).warnings

    assert "soft-cap" in warnings(softcap=True)[0] and "256" in warnings(widest_head=512)[0]
    assert warnings(widest_head=256) == ()
    spec = replace(SPEC, traits=Traits(softcap=True))
    assert choose_attention(("flash-attn",), "auto", "cuda", "bfloat16", spec, lambda name: None).warnings == ()
    assert choose_attention(("sdpa",), "auto", "cpu", "float32", spec, lambda name: None).warnings == ()


def test_nothing_works() -> None:
    faults = dict.fromkeys(("flash-attn", "sdpa", "efficient", "math", "eager"), "broken")
    with pytest.raises(DeviceError, match=r"eager: broken"):
        chosen("auto", faults)
