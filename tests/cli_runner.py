"""Runs the command line inside the test process, with streams of its own."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tidekv_cli.cli import main
from tidekv_cli.environment import Environment


@dataclass(frozen=True, slots=True)
class CliResult:
    """Exit code and what was written."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """Stdout as the one JSON document that it must be."""
        return json.loads(self.out)

    def assert_error(self, code: int, *words: str) -> None:
        """The code, exactly one `error:` and one `hint:` line, no traceback, nothing on stdout."""
        lines = self.err.splitlines()
        assert self.code == code, self.err
        assert sum(line.startswith("error: ") for line in lines) == 1, self.err
        assert sum(line.startswith("hint: ") for line in lines) == 1, self.err
        assert "Traceback" not in self.err
        for word in words:
            assert word in self.err, self.err


def run_cli(
    *arguments: str, stdin: bytes | None = b"", terminal: bool = False, environ: Mapping[str, str] | None = None
) -> CliResult:
    """`tidekv ARGUMENTS`; `stdin` None is a closed one. The user's own config and profiles are not seen."""
    out, err = io.BytesIO(), io.StringIO()
    hidden = ("TIDEKV_MODEL", "TIDEKV_DEVICE", "TIDEKV_PROFILE_DIR", "TIDEKV_TRACEBACK")
    variables = {key: value for key, value in os.environ.items() if key not in hidden}
    variables["XDG_CONFIG_HOME"] = "/nonexistent"
    environment = Environment(
        stdin=None if stdin is None else io.BytesIO(stdin),
        stdout=out,
        stderr=err,
        environ={**variables, **(environ or {})},
        stdin_is_terminal=terminal,
    )
    code = main(arguments, environment)
    return CliResult(int(code), out.getvalue().decode("utf-8"), err.getvalue())
