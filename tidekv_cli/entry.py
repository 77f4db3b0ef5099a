"""What the `tidekv` command calls: signals first, so that Ctrl-C during the imports is met too."""

from __future__ import annotations

import signal
import sys
import time
from types import FrameType

_ONE_PRESS_S = 2.0  # signals so close together are one: what the first began is not disturbed
_interrupted_at: float | None = None


def main() -> None:
    """Run the command line of this process. Ctrl-C that a library swallowed may be pressed again."""
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
        signal.signal(signal.SIGHUP, _terminate)
    code = 130
    try:
        from tidekv_cli.cli import entry_point

        code = entry_point()
    except KeyboardInterrupt:
        code = _interrupted_early()
    except Exception:
        if not just_interrupted():
            raise
        code = _interrupted_early()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Python's own end is not to be disturbed
    sys.exit(code)


def just_interrupted() -> bool:
    """Whether Ctrl-C was pressed just now: libraries make other errors of it while they are imported."""
    return _interrupted_at is not None and time.monotonic() - _interrupted_at < _ONE_PRESS_S


def _interrupted_early() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from tidekv_cli.cli import interrupted

    return interrupted()


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    global _interrupted_at
    if not just_interrupted():
        _interrupted_at = time.monotonic()
        raise KeyboardInterrupt


def _terminate(number: int, _frame: FrameType | None) -> None:
    """Leave by an exception, so that half-written files are removed."""
    sys.exit(128 + number)
