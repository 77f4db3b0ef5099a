"""Signals end what is done, wherever they meet the program. Knows no other module.

Not in the middle of an import: libraries take what is raised there for a module that is missing, or abort. Elsewhere it
may be swallowed too, so it is raised again until the program says that it has heard.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import Any

_AGAIN_S = 3.0  # long enough for what the first time began to come to its end
_SOON_S = 0.05
_pending: BaseException | None = None
_listening = False


def listen() -> None:
    """From here on Ctrl-C is a `KeyboardInterrupt`, and SIGTERM and SIGHUP are a `SystemExit` with their code."""
    global _listening
    _listening = True
    sys.unraisablehook = _swallowed
    signal.signal(signal.SIGINT, _heard)
    signal.signal(signal.SIGTERM, _heard)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
        signal.signal(signal.SIGHUP, _heard)
    signal.signal(signal.SIGALRM, _again)


def pending() -> BaseException | None:
    """What a signal has raised, if it has not come to the program's end yet: other exceptions are its consequences."""
    return _pending


def settle() -> None:
    """It has come there; nothing after that is worth interrupting. Does nothing where nobody listens."""
    global _pending
    if not _listening:
        return
    _pending = None
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _heard(number: int, frame: FrameType | None) -> None:
    global _pending
    if _pending is None:  # what the first signal began is not disturbed
        _pending = KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)
        _again(number, frame)


def _again(_number: int, frame: FrameType | None) -> None:
    if _pending is None:
        return
    if _importing(frame):
        signal.setitimer(signal.ITIMER_REAL, _SOON_S)
        return
    signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
    raise _pending


def _swallowed(told: Any) -> None:
    """What a destructor or the like may not raise: the signal's is raised elsewhere soon, others are told of."""
    if _pending is not None and told.exc_type is type(_pending):
        signal.setitimer(signal.ITIMER_REAL, _SOON_S)
    else:
        sys.__unraisablehook__(told)


def _importing(frame: FrameType | None) -> bool:
    """Whether a module is being imported in `frame` or one of those that called it."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
