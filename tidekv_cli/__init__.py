"""TideKV: long documents through language models on small devices. `open_model` is the way in from Python."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidekv_cli.model import Model
    from tidekv_cli.opening import open_model
    from tidekv_cli.run import Run

__all__ = ["Model", "Run", "open_model"]
__version__ = "0.1.0"

_HOMES = {"Model": "tidekv_cli.model", "open_model": "tidekv_cli.opening", "Run": "tidekv_cli.run"}


def __getattr__(name: str) -> Any:
    """What is offered is imported when it is wanted: the version is asked for without the rest."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
