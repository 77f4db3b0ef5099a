"""The child process against made-up `jtop` modules: talkative, silent, raising, of another version, missing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.machines import FIXTURES
from tidekv_cli.jtop import JtopError, describe_jtop, run_jtop

BOARD = json.loads((FIXTURES / "agx_orin_64/jtop_board.json").read_text())
MEMORY = json.loads((FIXTURES / "agx_orin_64/jtop_memory.json").read_text())
FAKE = f"""
import os, subprocess, sys, time
class Mode:
    def __str__(self):
        return "MAXN"
class jtop:
    board, memory, nvpmodel = {BOARD!r}, {MEMORY!r}, Mode()
    def __enter__(self):
        return self
    def __exit__(self, *_):
        pass
    def ok(self):
        return True
"""


def environ(directory: Path, addition: str = "", source: str = FAKE) -> dict[str, str]:
    """Variables under which `import jtop` finds the fake, with `addition` at its end."""
    directory.mkdir(exist_ok=True)
    (directory / "jtop.py").write_text(source + addition)
    return {**os.environ, "PYTHONPATH": str(directory)}


def test_what_it_reads(tmp_path: Path) -> None:
    document = run_jtop(environ(tmp_path), 30)
    assert document == {"hardware": BOARD["hardware"], "RAM": MEMORY["RAM"], "nvpmodel": "MAXN"}
    shown, notes = describe_jtop(document)
    assert notes == ()
    assert shown == {
        "jtop module": "NVIDIA Jetson AGX Orin (64GB ram)",
        "jtop L4T": "36.4.4",
        "jtop JetPack": "6.2.1",
        "jtop power mode": "MAXN",
        "jtop RAM": "11.118 GiB used of 61.368 GiB",
    }


def test_rubbish_on_stdout(tmp_path: Path) -> None:
    rubbish = 'print("[WARN] board not known", end="")\nos.write(1, b"\\xff{}\\n[1]")\nos.write(2, b"more")\n'
    assert run_jtop(environ(tmp_path, rubbish), 30)["nvpmodel"] == "MAXN"


def test_no_power_mode(tmp_path: Path) -> None:
    document = run_jtop(environ(tmp_path, "jtop.nvpmodel = None\n"), 30)
    assert document["nvpmodel"] is None
    shown, notes = describe_jtop(document)
    assert "jtop power mode" not in shown and notes == ("jtop power mode: not given",)


@pytest.mark.parametrize("value", ["", None])
def test_a_board_that_it_does_not_know(value: Any) -> None:
    hardware = {**BOARD["hardware"], "Module": value, "Jetpack": value}
    shown, notes = describe_jtop({"hardware": hardware, "RAM": MEMORY["RAM"], "nvpmodel": "MAXN"})
    assert set(shown) == {"jtop L4T", "jtop power mode", "jtop RAM"}
    assert notes == ("jtop module: not given", "jtop JetPack: not given")


@pytest.mark.parametrize("document", [{}, {"hardware": None, "RAM": []}, {"hardware": "x", "RAM": {"tot": "many"}}])
def test_another_shape(document: dict[str, Any]) -> None:
    shown, notes = describe_jtop(document)
    assert shown == {} and len(notes) == 5


@pytest.mark.parametrize(
    ("addition", "said"),
    [
        ("def ok(self): return False\njtop.ok = ok\n", "gives no reading"),
        ("def enter(self): raise OSError('The jtop.service is not active')\njtop.__enter__ = enter\n", "not active"),
        (
            "def enter(self): raise RuntimeError('Mismatch version jtop service: [4.2.0] and client: [4.3.0]')\n"
            "jtop.__enter__ = enter\n",
            "Mismatch version",
        ),
        ("jtop.board = None\n", "AttributeError"),
        ("jtop.memory = 3\n", "AttributeError"),
        ("raise ImportError('no smbus2')\n", "no smbus2"),
        ("del jtop\n", "ImportError"),
        ("os._exit(5)\n", "exit code 5"),
        ("print('tidekv-jtop: {', flush=True)\nos._exit(0)\n", "no JSON"),
        ("print('tidekv-jtop: []', flush=True)\nos._exit(0)\n", "no object"),
    ],
)
def test_failures(tmp_path: Path, addition: str, said: str) -> None:
    with pytest.raises(JtopError) as caught:
        run_jtop(environ(tmp_path, addition), 30)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(JtopError, match="not installed"):
        run_jtop(environ(tmp_path, source="raise ModuleNotFoundError(\"No module named 'jtop'\")\n"), 30)


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie that nobody waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_silent_and_killed_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    addition = (
        "def enter(self):\n"
        "    other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"    open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{other.pid}} ')\n"
        "    time.sleep(600)\n"
        "jtop.__enter__ = enter\n"
    )
    began = time.monotonic()
    with pytest.raises(JtopError, match="no answer within 3 s"):
        run_jtop(environ(tmp_path / "fake", addition))
    assert time.monotonic() - began < 10
    started = [int(pid) for pid in pids.read_text().split()]
    assert len(started) == 2
    deadline = time.monotonic() + 5
    while any(map(alive, started)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(alive, started))


def test_an_answer_before_it_hangs_counts(tmp_path: Path) -> None:
    addition = "def leave(self, *_): time.sleep(600)\njtop.__exit__ = leave\n"
    assert run_jtop(environ(tmp_path, addition))["nvpmodel"] == "MAXN"


def test_one_that_left_the_group_is_not_waited_for(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    addition = (
        "other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
        f"open({str(pids)!r}, 'w').write(str(other.pid))\n"
        "time.sleep(600)\n"
    )
    began = time.monotonic()
    try:
        with pytest.raises(JtopError, match="no answer"):
            run_jtop(environ(tmp_path / "fake", addition))
        assert time.monotonic() - began < 10
    finally:
        os.kill(int(pids.read_text()), signal.SIGKILL)


def test_a_file_of_the_user_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, fake = tmp_path / "mine", tmp_path / "fake"
    environ(mine, source="open('was_run', 'w')\n")
    variables = environ(fake)
    monkeypatch.chdir(mine)
    assert run_jtop(variables, 30)["nvpmodel"] == "MAXN"
    assert not (mine / "was_run").exists()


def test_it_is_never_imported_here(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom tidekv_cli.jtop import run_jtop\nassert run_jtop()['nvpmodel'] == 'MAXN'\n"
        "assert 'jtop' not in sys.modules"
    )
    variables = environ(tmp_path)
    variables["PYTHONPATH"] += os.pathsep + str(Path(__file__).parent.parent)
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
