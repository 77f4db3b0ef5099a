"""The process's streams and variables as one object, so that the program can be run inside a test."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO, TextIO


@dataclass(frozen=True, slots=True)
class Environment:
    """`stdin` and `stdout` carry bytes; None means closed. `stdin_is_terminal` decides whether it is read."""

    stdin: BinaryIO | None
    stdout: BinaryIO | None
    stderr: TextIO
    environ: Mapping[str, str]
    stdin_is_terminal: bool = False

    @classmethod
    def of_process(cls) -> Environment:
        """The real streams."""
        return cls(
            stdin=sys.stdin.buffer if sys.stdin is not None else None,
            stdout=sys.stdout.buffer if sys.stdout is not None else None,
            stderr=sys.stderr if sys.stderr is not None else io.StringIO(),  # closed: said to nobody
            environ=os.environ,
            stdin_is_terminal=sys.stdin is not None and sys.stdin.isatty(),
        )

    def write(self, text: str) -> None:
        """Text to stdout, at once, as UTF-8 whatever the locale."""
        if self.stdout is None:
            raise BrokenPipeError("standard output is closed")
        self.stdout.write(text.encode("utf-8", "replace"))
        self.stdout.flush()
