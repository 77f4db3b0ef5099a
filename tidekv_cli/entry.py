"""What the `tidekv` command calls: signals first, so that Ctrl-C during the imports is met too."""

from __future__ import annotations

import sys

from tidekv_cli.interrupts import ignore_interrupts, just_interrupted, listen


def main() -> None:
    """Run the command line of this process, to its exit code."""
    listen()
    try:
        from tidekv_cli.cli import entry_point

        code = entry_point()
    except KeyboardInterrupt:
        code = _interrupted()
    except Exception:
        if not just_interrupted():
            raise
        code = _interrupted()
    ignore_interrupts()  # Python's own end is not to be disturbed
    sys.exit(code)


def _interrupted() -> int:
    """Before the command line was read."""
    ignore_interrupts()
    from tidekv_cli.cli import interrupted

    return interrupted()
