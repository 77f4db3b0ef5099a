"""What the `tidekv` command calls: signals first, so that Ctrl-C during the imports is met too."""

from __future__ import annotations

import signal
import sys
from types import FrameType


def main() -> None:
    """Run the command line of this process; a second Ctrl-C does not disturb what the first one began."""
    signal.signal(signal.SIGINT, _interrupt_once)
    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
        signal.signal(signal.SIGHUP, _terminate)
    try:
        from tidekv_cli.cli import entry_point
    except KeyboardInterrupt:
        from tidekv_cli.cli import interrupted

        interrupted()
    entry_point()


def _interrupt_once(_signal: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _terminate(number: int, _frame: FrameType | None) -> None:
    """Leave by an exception, so that half-written files are removed."""
    sys.exit(128 + number)
