"""The user's config file. Flag over environment over this file over profile."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tidekv_cli.profile import TOKENS
from tidekv_cli.user_files import user_path
from tidekv_cli.yaml_lines import Checker, Value, mapping, read_yaml, text


def _budget(value: Value) -> int | str:
    return str(value.content) if value.content in ("full", "auto") else int(TOKENS(value))


_KEYS: dict[str, Checker] = {
    "model": text,
    "device": text,
    "profile": text,
    "method": text,
    "attention": text,
    "dtype": text,
    "chunk_size": TOKENS,
    "score_block": TOKENS,
    "budget": _budget,
    "max_new_tokens": TOKENS,
}


def config_path(environ: Mapping[str, str]) -> Path:
    """`$XDG_CONFIG_HOME/tidekv/config.yaml`, by default below `~/.config`."""
    base = environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else user_path("~/.config")) / "tidekv" / "config.yaml"


def load_settings(environ: Mapping[str, str]) -> dict[str, Any]:
    """What the config file and the environment set, by key. Raises `UsageError` for a file that is wrong."""
    path = config_path(environ)
    document = read_yaml(path, "the config file") if os.path.exists(path) else None
    values: dict[str, Any] = {} if document is None else mapping(_KEYS)(document)
    for key, variable in (("model", "TIDEKV_MODEL"), ("device", "TIDEKV_DEVICE")):
        if environ.get(variable):
            values[key] = environ[variable]
    return values
