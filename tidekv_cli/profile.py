"""Device profiles: settings by kind of device, how they are found and matched. Reads no device and no model."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tidekv_cli.errors import UsageError
from tidekv_cli.user_files import user_path
from tidekv_cli.yaml_lines import (
    Checker,
    Value,
    amount,
    check_keys,
    entries,
    list_of,
    mapping,
    number,
    one_of,
    optional,
    read_yaml,
    text,
    whole,
)

KINDS = ("cpu", "cuda", "jetson")
DTYPES = ("float32", "bfloat16", "float16")
ATTENTION = ("flash-attn", "sdpa", "efficient", "math", "eager")
CPU_ATTENTION = ("sdpa", "math", "eager")
RESERVE_ITEMS = ("process", "context", "allocator", "backend", "system")
MOST_TOKENS = 1 << 20  # of a chunk, a score block, a budget or an answer: more is a slip of the hand
TOKENS = whole("tokens", most=MOST_TOKENS)
_FALLBACK = {"cpu": "cpu", "cuda": "generic-cuda", "jetson": "generic-cuda"}


@dataclass(frozen=True, slots=True)
class Match:
    """Which devices a profile is for: patterns of names and boards, and their total memory in MiB, ends included.

    What is None or empty is not asked about; a profile that asks nothing is chosen by name only.
    """

    names: tuple[str, ...] = ()
    boards: tuple[str, ...] = ()
    total_mib: tuple[int, int] | None = None

    def accepts(self, device_name: str, board: str | None, total_bytes: int | None) -> bool:
        """Whether all that is asked holds; what the device does not tell does not hold."""
        asked = []
        if self.names:
            asked.append(_fits(device_name, self.names))
        if self.boards:
            asked.append(board is not None and _fits(board, self.boards))
        if self.total_mib is not None:
            low, high = self.total_mib
            asked.append(total_bytes is not None and low << 20 <= total_bytes <= high << 20)
        return bool(asked) and all(asked)


@dataclass(frozen=True, slots=True)
class Profile:
    """Settings for one kind of device; `sources` says for each of them where it is from.

    Sizes are in tokens, `reserve` and `memory` in bytes. `memory` is the total that driver or kernel report;
    `bandwidth_gb_s` and `tflops` (dense, at `dtype`) are what the device does at most. All three may be unknown.
    `allocator` holds the environment variables to set before torch starts on the device.
    """

    name: str
    description: str
    kind: str
    match: Match
    memory: int | None
    bandwidth_gb_s: float | None
    tflops: float | None
    chunk_size: int
    score_block: int
    budget: int
    attention: tuple[str, ...]
    dtype: str
    max_new_tokens: int
    allocator: Mapping[str, str]
    reserve: Mapping[str, int]
    sources: Mapping[str, str]
    path: Path


def _range_mib(value: Value) -> tuple[int, int]:
    low, high = list_of(whole("MiB"), "two numbers, [low, high]", length=2)(value)
    if low > high:
        raise value.wrong(f"[low, high], and {low} is above {high}")
    return low, high


def _variables(value: Value) -> dict[str, str]:
    """Only what steers the allocators, so that a profile cannot preload a library."""
    for key, inner in entries(value).items():
        if not re.fullmatch(r"(PYTORCH|CUDA|CUBLAS)_[A-Z0-9_]{1,60}", key):
            raise inner.error(f"{inner.key} must be a variable that begins with PYTORCH_, CUDA_ or CUBLAS_")
    return {key: text(inner) for key, inner in entries(value).items()}


def _match(value: Value) -> Match:
    patterns = list_of(text, "patterns like '*A100*'")
    return Match(**mapping({"names": patterns, "boards": patterns, "total_mib": _range_mib})(value))


def _any_text(value: Value) -> dict[str, str]:
    return {key: text(inner) for key, inner in entries(value).items()}


_FIELDS: Mapping[str, Checker] = {
    "name": text,
    "description": text,
    "kind": one_of(KINDS),
    "match": _match,
    "memory": optional(amount(1)),
    "bandwidth_gb_s": optional(number),
    "tflops": optional(number),
    "chunk_size": TOKENS,
    "score_block": TOKENS,
    "budget": TOKENS,
    "attention": list_of(one_of(ATTENTION), f"backends, the best first, out of {', '.join(ATTENTION)}"),
    "dtype": one_of(DTYPES),
    "max_new_tokens": TOKENS,
    "allocator": _variables,
    "reserve": mapping(dict.fromkeys(RESERVE_ITEMS, amount(0))),
    "sources": _any_text,
}
_UNSOURCED = ("name", "description", "kind", "sources")  # labels, not facts


def load_profile(path: Path) -> Profile:
    """Read and validate one file. Raises `UsageError` naming the file, the line, the value and what is allowed."""
    document = read_yaml(path, "the profile")
    values = mapping(_FIELDS, required=True)(document)
    found = entries(document)
    absent = [name for name in values["attention"] if name not in CPU_ATTENTION]
    if values["kind"] == "cpu" and absent:
        has = ", ".join(CPU_ATTENTION)
        raise found["attention"].error(f"attention names {absent[0]}, which a cpu has not; it may have {has}")
    wanted = dict.fromkeys(_sourced(found))
    check_keys(found["sources"], wanted, wanted)
    return Profile(**values, path=path)


def _sourced(found: Mapping[str, Value]) -> Iterator[str]:
    """The keys that need a source: of `match` and `reserve` each item."""
    for key, value in found.items():
        if key in ("match", "reserve"):
            yield from (f"{key}.{item}" for item in entries(value))
        elif key not in _UNSOURCED:
            yield key


def profile_directories(environ: Mapping[str, str]) -> list[Path]:
    """Where profiles are looked for, the user's own directory first."""
    shipped = Path(__file__).parent / "profiles"
    if not shipped.is_dir():  # a source tree, where they are at the top level
        shipped = Path(__file__).parent.parent / "profiles"
    own = environ.get("TIDEKV_PROFILE_DIR")
    return [*([user_path(own)] if own else []), shipped]


def list_profiles(environ: Mapping[str, str]) -> dict[str, Profile]:
    """Every profile by name, the user's own first; they hide shipped ones of the same name."""
    found: dict[str, Profile] = {}
    for directory in profile_directories(environ):
        if not os.path.isdir(directory):
            raise UsageError(f"the profile directory {directory} does not exist", "check TIDEKV_PROFILE_DIR")
        own = [load_profile(path) for path in sorted(directory.glob("*.yaml")) if path.is_file()]
        found |= {profile.name: profile for profile in own if profile.name not in found}
    return found


def find_profile(reference: str, environ: Mapping[str, str]) -> Profile:
    """The profile called `reference`, or in the YAML file of that path. Raises `UsageError` if there is none."""
    if reference.endswith((".yaml", ".yml")):
        return load_profile(user_path(reference))
    profiles = list_profiles(environ)
    if reference not in profiles:
        raise UsageError(f"there is no profile {reference!r}", f"known are {', '.join(profiles)}, or give a YAML file")
    return profiles[reference]


def match_profile(
    device_name: str, kind: str, board: str | None, total_bytes: int | None, profiles: Mapping[str, Profile]
) -> Profile:
    """The first of `profiles`, as `list_profiles` gives them, that is for such a device; else that of its `kind`.

    `device_name` is what the driver says, `board` the device tree's model, None where there is none.
    """
    for profile in profiles.values():
        if profile.kind == kind and profile.match.accepts(device_name, board, total_bytes):
            return profile
    return profiles[_FALLBACK[kind]]


def _fits(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name.lower(), pattern.lower()) for pattern in patterns)


def profile_document(profile: Profile) -> dict[str, Any]:
    """The profile for `--json`: its keys, amounts in bytes."""
    return {**asdict(profile), "path": str(profile.path)}
