"""Device profiles: YAML files turned into validated settings. Knows no device and no model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidekv_cli.errors import UsageError
from tidekv_cli.units import parse_bytes
from tidekv_cli.user_files import read_yaml_mapping, user_path

KINDS = ("cpu", "cuda", "jetson")
DTYPES = ("float32", "bfloat16", "float16")
ATTENTION = ("flash-attn", "sdpa", "eager")
_KEYS = {
    "name": str,
    "description": str,
    "kind": str,
    "chunk_size": int,
    "score_block": int,
    "budget": int,
    "attention": list,
    "dtype": str,
    "max_new_tokens": int,
    "reserve": dict,
    "sources": dict,
}


@dataclass(frozen=True, slots=True)
class Profile:
    """Settings for one kind of device: tokens for sizes, bytes for `reserve`; `sources` says why each is so."""

    name: str
    description: str
    kind: str
    chunk_size: int
    score_block: int
    budget: int
    attention: tuple[str, ...]
    dtype: str
    max_new_tokens: int
    reserve: Mapping[str, int]
    sources: Mapping[str, str]
    path: Path


def profile_directories(environ: Mapping[str, str]) -> list[Path]:
    """Where profiles are looked for, the user's own directory first."""
    shipped = Path(__file__).parent / "profiles"
    if not shipped.is_dir():  # a source tree, where they are at the top level
        shipped = Path(__file__).parent.parent / "profiles"
    own = environ.get("TIDEKV_PROFILE_DIR")
    return [*([user_path(own)] if own else []), shipped]


def list_profiles(environ: Mapping[str, str]) -> dict[str, Profile]:
    """Every profile by name; the user's own hide shipped ones of the same name."""
    found: dict[str, Profile] = {}
    for directory in reversed(profile_directories(environ)):
        if not os.path.isdir(directory):
            raise UsageError(f"the profile directory {directory} does not exist", "check TIDEKV_PROFILE_DIR")
        for path in sorted(directory.glob("*.yaml")):
            profile = load_profile(path)
            found[profile.name] = profile
    return found


def find_profile(reference: str, environ: Mapping[str, str]) -> Profile:
    """The profile called `reference`, or in the YAML file of that path. Raises `UsageError` if there is none."""
    if reference.endswith((".yaml", ".yml")):
        return load_profile(user_path(reference))
    profiles = list_profiles(environ)
    if reference not in profiles:
        raise UsageError(f"there is no profile {reference!r}", f"known are {', '.join(profiles)}, or give a YAML file")
    return profiles[reference]


def load_profile(path: Path) -> Profile:
    """Read and validate one file. Raises `UsageError` naming the file, the key, the value and what is allowed."""
    values = read_yaml_mapping(path, "the profile")
    _check_keys(path, values)
    for key in ("chunk_size", "score_block", "budget", "max_new_tokens"):
        if values[key] < 1:
            raise _bad(path, key, values[key], "a number of tokens, at least 1")
    _check_choice(path, "kind", [values["kind"]], KINDS)
    _check_choice(path, "dtype", [values["dtype"]], DTYPES)
    _check_choice(path, "attention", values["attention"], ATTENTION[1:] if values["kind"] == "cpu" else ATTENTION)
    if not values["attention"]:
        raise _bad(path, "attention", [], "a list with the best backend first")
    reserve = {key: parse_bytes(str(amount), f"{path}: reserve.{key}") for key, amount in values["reserve"].items()}
    return Profile(**{**values, "attention": tuple(values["attention"]), "reserve": reserve, "path": path})


def _check_keys(path: Path, values: dict[str, Any]) -> None:
    unknown, missing = sorted(set(map(str, values)) - set(_KEYS)), sorted(set(_KEYS) - set(map(str, values)))
    if unknown or missing:
        what = f"has an unknown key {unknown[0]!r}" if unknown else f"lacks the key {missing[0]!r}"
        raise UsageError(f"the profile {path} {what}", f"its keys are {', '.join(_KEYS)}")
    for key, kind in _KEYS.items():
        if not isinstance(values[key], kind) or isinstance(values[key], bool):
            raise _bad(path, key, values[key], f"a value of type {kind.__name__}")


def _check_choice(path: Path, key: str, values: list[Any], allowed: tuple[str, ...]) -> None:
    for value in values:
        if value not in allowed:
            raise _bad(path, key, value, f"one of {', '.join(allowed)}")


def _bad(path: Path, key: str, value: Any, allowed: str) -> UsageError:
    return UsageError(f"the profile {path} has {key}: {value!r}", f"it must be {allowed}")
