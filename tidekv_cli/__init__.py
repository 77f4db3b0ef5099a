"""TideKV: long documents through language models on small devices. `open_model` is the way in from Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidekv_cli.model import open_model

__all__ = ["open_model"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`open_model` is imported when it is wanted: the version is asked for without the rest."""
    if name != "open_model":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tidekv_cli.model import open_model

    return open_model
