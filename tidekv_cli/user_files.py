"""Paths and YAML files that the user names: whatever they hold ends in a value or a `UsageError`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tidekv_cli.errors import UsageError


def user_path(text: str) -> Path:
    """`text` with `~` expanded; an unknown `~user` stays as it is, and so does not exist."""
    return Path(os.path.expanduser(text))


def read_yaml_mapping(path: Path, what: str) -> dict[str, Any]:
    """The mapping in the YAML file `path`, {} if it holds nothing.

    Raises `UsageError` naming `what` and the file where it cannot be read, is no YAML, or is no mapping.
    """
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{what} {path} cannot be read: {error.strerror or error}", "check the path") from error
    # A date like 2020-13-45 is a ValueError, a thousand brackets a RecursionError.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"{what} {path} is no valid YAML: {error}", "correct the file") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UsageError(f"{what} {path} is no mapping", "write one `key: value` on each line")
    return values
