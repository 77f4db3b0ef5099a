"""Paths that the user names."""

from __future__ import annotations

import os
from pathlib import Path


def user_path(text: str) -> Path:
    """`text` with `~` expanded; an unknown `~user` stays as it is, and so does not exist."""
    return Path(os.path.expanduser(text))
