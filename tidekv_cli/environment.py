"""The process's streams and variables as one object, so that the program can be run inside a test."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import BinaryIO, TextIO, cast

from tidekv_cli.errors import UsageError


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
        """The real streams, which wait until they can be read and written."""
        for stream in (sys.stdin, sys.stdout):
            if stream is not None:
                with suppress(OSError, ValueError):
                    os.set_blocking(stream.fileno(), True)
        return cls(
            stdin=sys.stdin.buffer if sys.stdin is not None else None,
            stdout=sys.stdout.buffer if sys.stdout is not None else None,
            stderr=io.StringIO() if sys.stderr is None else cast(TextIO, _Spoken(sys.stderr)),  # closed: said to nobody
            environ=os.environ,
            stdin_is_terminal=sys.stdin is not None and sys.stdin.isatty(),
        )

    def write(self, text: str) -> None:
        """Text to stdout, at once, as UTF-8 whatever the locale. Raises `UsageError` where there is no room."""
        if self.stdout is None:
            raise BrokenPipeError("standard output is closed")
        try:
            self.stdout.write(text.encode("utf-8", "replace"))
            self.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise UsageError(
                f"standard output cannot be written: {error.strerror or error}", "make room, or send it elsewhere"
            ) from error


class _Spoken:
    """A stream for people: what cannot be written to it is lost, and the program goes on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.encoding = stream.encoding

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()
