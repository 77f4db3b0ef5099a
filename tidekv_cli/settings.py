"""The user's config file. Flag over environment over this file over profile."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tidekv_cli.errors import UsageError
from tidekv_cli.user_files import read_yaml_mapping, user_path

_KEYS: dict[str, tuple[type, ...]] = {
    "model": (str,),
    "device": (str,),
    "profile": (str,),
    "method": (str,),
    "attention": (str,),
    "dtype": (str,),
    "chunk_size": (int,),
    "score_block": (int,),
    "budget": (int, str),
    "max_new_tokens": (int,),
}


def config_path(environ: Mapping[str, str]) -> Path:
    """`$XDG_CONFIG_HOME/tidekv/config.yaml`, by default below `~/.config`."""
    base = environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else user_path("~/.config")) / "tidekv" / "config.yaml"


def load_settings(environ: Mapping[str, str]) -> dict[str, Any]:
    """What the config file and the environment set, by key. Raises `UsageError` for a file that is wrong."""
    path = config_path(environ)
    values = read_yaml_mapping(path, "the config file") if os.path.exists(path) else {}
    for key, value in values.items():
        if key not in _KEYS:
            raise UsageError(f"the config file {path} has an unknown key {key!r}", f"known: {', '.join(_KEYS)}")
        if not isinstance(value, _KEYS[key]) or isinstance(value, bool):
            raise UsageError(f"the config file {path} has {key}: {value!r}", "give a value of the right type")
    for key, variable in (("model", "TIDEKV_MODEL"), ("device", "TIDEKV_DEVICE")):
        if environ.get(variable):
            values[key] = environ[variable]
    return values
