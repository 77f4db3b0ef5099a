"""The user's config file. Flag over environment over this file over profile."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tidekv_cli.errors import UsageError

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
    return (Path(base) if base else Path("~/.config").expanduser()) / "tidekv" / "config.yaml"


def load_settings(environ: Mapping[str, str]) -> dict[str, Any]:
    """What the config file and the environment set, by key. Raises `UsageError` for a file that is wrong."""
    path = config_path(environ)
    values: Any = {}
    if path.is_file():
        import yaml

        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
            raise UsageError(f"the config file {path} cannot be read: {error}", "correct or remove it") from error
        if not isinstance(values, dict):
            raise UsageError(f"the config file {path} is no mapping", f"its keys are {', '.join(_KEYS)}")
        for key, value in values.items():
            if key not in _KEYS:
                raise UsageError(f"the config file {path} has an unknown key {key!r}", f"known: {', '.join(_KEYS)}")
            if not isinstance(value, _KEYS[key]) or isinstance(value, bool):
                raise UsageError(f"the config file {path} has {key}: {value!r}", "give a value of the right type")
    for key, variable in (("model", "TIDEKV_MODEL"), ("device", "TIDEKV_DEVICE")):
        if environ.get(variable):
            values[key] = environ[variable]
    return dict(values)
