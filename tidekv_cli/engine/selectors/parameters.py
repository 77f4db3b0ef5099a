"""Checks of parameters that several selectors have. Knows no selector."""

from __future__ import annotations

from tidekv_cli.errors import UsageError

_WIDEST_POOL = 1023


def check_window(window: int) -> None:
    """Raises `UsageError` for a window of no queries."""
    if window < 1:
        raise UsageError(f"window={window} is impossible", "use 1 or more")


def check_sinks(sinks: int) -> None:
    """Raises `UsageError` for less than none."""
    if sinks < 0:
        raise UsageError(f"sinks={sinks} is impossible", "use 0 or more")


def check_pool_kernel(pool_kernel: int) -> None:
    """Raises `UsageError` where a pool would have no middle, or be too wide."""
    if not 1 <= pool_kernel <= _WIDEST_POOL or pool_kernel % 2 == 0:
        raise UsageError(f"pool_kernel={pool_kernel} is impossible", f"use an odd number from 1 to {_WIDEST_POOL}")
