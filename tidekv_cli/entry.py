"""What the `tidekv` command calls: signals first, so that Ctrl-C during the imports is met too."""

from __future__ import annotations

import sys

from tidekv_cli import interrupts


def main() -> None:
    """Run the command line of this process, to its exit code."""
    interrupts.listen()
    try:
        from tidekv_cli.cli import entry_point

        code = entry_point()
    except (Exception, KeyboardInterrupt):
        found = interrupts.pending()
        if found is None:
            raise
        interrupts.settle()
        if isinstance(found, SystemExit):
            raise found from None
        from tidekv_cli.cli import interrupted

        code = interrupted()
    finally:
        interrupts.settle()  # Python's own end is not to be disturbed
    sys.exit(code)
