"""The command as a process of its own: Ctrl-C at any moment, once and twice, and streams that do not wait."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
RUN = [sys.executable, "-m", "tidekv_cli", "run"]


@pytest.fixture
def document(tmp_path: Path, embedded_path: Path) -> str:
    path = tmp_path / "harbour.txt"
    path.write_text("The harbour master of Vell kept a green ledger of every ship. " * 30, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("seconds", [0.1, 0.15, 0.3, 0.6, 1.5, 3.0, 5.0, 8.0])
@pytest.mark.parametrize("again", [None, 0.02, 0.3])
def test_interrupts_at_any_moment(document: str, seconds: float, again: float | None) -> None:
    command = [*RUN, document, "-n", "200", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    if again is not None:
        time.sleep(again)
        process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    if process.returncode in (0, -signal.SIGINT) and "tidekv_cli" not in err:
        return  # it was quicker than the signal, or Python itself had not yet come to any code of ours
    assert "Traceback" not in err
    assert process.returncode == 130, err
    assert err.count("error: interrupted") == 1 and err.count("hint: ") == 1
    assert isinstance(json.loads(out), dict)


def test_streams_that_do_not_wait(document: str) -> None:
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    process = subprocess.Popen([*RUN, "-n", "2", "--json", "-q"], stdin=read_end, stdout=subprocess.PIPE, text=True)
    os.close(read_end)
    time.sleep(2)
    os.write(write_end, Path(document).read_bytes())
    os.close(write_end)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0 and json.loads(out)["prompt"]["tokens"] > 100


def test_sigterm_leaves_by_its_own_code(document: str) -> None:
    process = subprocess.Popen([*RUN, document, "-n", "200"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(4)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 143 and "Traceback" not in err
