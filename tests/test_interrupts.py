"""Signals that meet the program where what they raise would be lost: in an import, and where it is swallowed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LISTENING = "import os, signal, sys, time\nfrom tidekv_cli import interrupts\ninterrupts.listen()\n"


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    paths = {"PYTHONPATH": f"{folder}:{Path(__file__).parent.parent}"}
    return subprocess.run([sys.executable, "-c", LISTENING + code], capture_output=True, text=True, env=paths)


def test_an_import_is_not_broken_off(tmp_path: Path) -> None:
    slow = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(0.2)\nprint('imported')\n"
    (tmp_path / "slow.py").write_text(slow, encoding="utf-8")
    done = run("try:\n import slow\n time.sleep(5)\nexcept KeyboardInterrupt:\n print('heard')\n", tmp_path)
    assert done.stdout.split() == ["imported", "heard"]


@pytest.mark.slow
def test_what_is_swallowed_is_raised_again(tmp_path: Path) -> None:
    swallowed = "try:\n os.kill(os.getpid(), signal.{})\n time.sleep(1)\nexcept BaseException:\n print('lost')\n"
    rest = "try:\n time.sleep(20)\nexcept {}:\n print('heard')\n interrupts.settle()\ntime.sleep(4)\nprint('quiet')\n"
    for number, raised in (("SIGINT", "KeyboardInterrupt"), ("SIGTERM", "SystemExit")):
        done = run(swallowed.format(number) + rest.format(raised), tmp_path)
        assert done.stdout.split() == ["lost", "heard", "quiet"], done.stderr


def test_what_a_destructor_may_not_raise_is_raised_soon_and_not_told_of(tmp_path: Path) -> None:
    press = "class Held:\n def __del__(self):\n  os.kill(os.getpid(), signal.SIGINT)\n  time.sleep(0.1)\n"
    code = f"{press}try:\n held = Held()\n del held\n time.sleep(2)\nexcept KeyboardInterrupt:\n print('heard')\n"
    done = run(code, tmp_path)
    assert done.stdout.split() == ["heard"] and done.stderr == ""


def test_a_second_signal_does_not_disturb_the_first(tmp_path: Path) -> None:
    press = "os.kill(os.getpid(), signal.SIGINT)"
    code = (
        f"try:\n try:\n  {press}\n finally:\n  {press}\n  print('closed')\nexcept KeyboardInterrupt:\n print('heard')\n"
    )
    assert run(code, tmp_path).stdout.split() == ["closed", "heard"]
