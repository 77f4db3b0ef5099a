"""Signals: the first ends what is done, and what it began is not disturbed. Knows no other module."""

from __future__ import annotations

import signal
import sys
import time
from types import FrameType

_ONE_PRESS_S = 2.0  # signals so close together are one
_interrupted_at: float | None = None


def listen() -> None:
    """From here on Ctrl-C is a `KeyboardInterrupt`; one that a library swallowed may be pressed again."""
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
        signal.signal(signal.SIGHUP, _terminate)


def ignore_interrupts() -> None:
    """From here on nothing is worth interrupting."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def just_interrupted() -> bool:
    """Whether Ctrl-C was pressed just now: libraries make other errors of it while they are imported."""
    return _interrupted_at is not None and time.monotonic() - _interrupted_at < _ONE_PRESS_S


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    global _interrupted_at
    if not just_interrupted():
        _interrupted_at = time.monotonic()
        raise KeyboardInterrupt


def _terminate(number: int, _frame: FrameType | None) -> None:
    """Leave by an exception, so that half-written files are removed."""
    sys.exit(128 + number)
