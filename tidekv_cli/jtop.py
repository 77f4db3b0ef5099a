"""jtop (jetson-stats), run in a child process: for colour only, no figure of it decides anything.

Knows no device. jetson-stats is optional, may print while it is imported, raises without its service or with a
service of another version, and waits for ever for a silent one; so it is never imported here.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from tidekv_cli.units import format_bytes

_PREFIX = "tidekv-jtop: "
_LIMIT_S = 3.0
_CHILD = f"""
import sys
sys.path = [place for place in sys.path if place]  # not the user's directory, which may hold a jtop.py
import json
from jtop import jtop
with jtop() as jetson:
    if not jetson.ok():
        raise RuntimeError("jtop gives no reading")
    mode = jetson.nvpmodel
    hardware, memory = jetson.board.get("hardware") or {{}}, jetson.memory.get("RAM") or {{}}
    answer = {{"hardware": dict(hardware), "RAM": dict(memory), "nvpmodel": None if mode is None else str(mode)}}
    print("\\n" + {_PREFIX!r} + json.dumps(answer, default=str), flush=True)
"""


class JtopError(Exception):
    """jtop said nothing that can be used; the message is its last line."""


def run_jtop(environ: Mapping[str, str] | None = None, limit_s: float = _LIMIT_S) -> Mapping[str, Any]:
    """`hardware`, `RAM` (KiB; lfb counts blocks) and `nvpmodel` as jtop gives them. Raises `JtopError`, `OSError`.

    The child and all that it started is killed after `limit_s` seconds; what it had said by then counts.
    """
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environ,
        start_new_session=True,
    )
    late = False
    try:
        out, err = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        late = True
        _kill_group(child)
        out, err = _rest(child)
    except BaseException:  # Ctrl-C
        _kill_group(child)
        child.wait()
        raise
    for line in reversed(out.decode("utf-8", "replace").splitlines()):
        if line.startswith(_PREFIX):
            return _parse(line.removeprefix(_PREFIX))
    if late:
        raise JtopError(f"no answer within {limit_s:g} s")
    said = err.decode("utf-8", "replace").strip().splitlines() or [f"exit code {child.returncode} and no answer"]
    if "No module named 'jtop'" in said[-1]:
        raise JtopError("jetson-stats is not installed (optional)")
    raise JtopError(said[-1].strip())


def describe_jtop(document: Mapping[str, Any]) -> tuple[dict[str, str], tuple[str, ...]]:
    """What people want to see of `run_jtop`'s answer, and a note for each thing that it lacks."""
    hardware, memory = _mapping(document.get("hardware")), _mapping(document.get("RAM"))
    wanted = {
        "jtop module": hardware.get("Module"),
        "jtop L4T": hardware.get("L4T"),
        "jtop JetPack": hardware.get("Jetpack"),
        "jtop power mode": document.get("nvpmodel"),
        "jtop RAM": _used(memory),
    }
    shown = {key: str(value) for key, value in wanted.items() if value not in (None, "")}
    return shown, tuple(f"{key}: not given" for key in wanted if key not in shown)


def _used(memory: Mapping[str, Any]) -> str | None:
    used, total = memory.get("used"), memory.get("tot")
    if not isinstance(used, int) or not isinstance(total, int):
        return None
    return f"{format_bytes(1024 * used)} used of {format_bytes(1024 * total)}"


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _parse(text: str) -> Mapping[str, Any]:
    try:
        document = json.loads(text)
    except ValueError as error:
        raise JtopError(f"an answer that is no JSON: {error}") from error
    if not isinstance(document, dict):
        raise JtopError(f"an answer that is no object: {text[:40]}")
    return document


def _rest(child: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """What a killed child said. One that left its group may still hold the pipes, which is not waited for."""
    try:
        return child.communicate(timeout=0.5)
    except subprocess.TimeoutExpired as error:
        for pipe in (child.stdout, child.stderr):
            if pipe is not None:
                pipe.close()
        child.wait()
        return error.stdout or b"", error.stderr or b""


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    with suppress(OSError):
        os.killpg(child.pid, signal.SIGKILL)
