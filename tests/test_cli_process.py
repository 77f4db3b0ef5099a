"""The command as a process of its own: Ctrl-C at any moment, once and twice, and streams that do not wait."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT

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


def test_the_process_takes_what_was_planned(embedded_path: Path) -> None:
    """The embedded model on the long example: the peak of its process is within 10 %, or 100 MiB, of the plan's."""
    done = subprocess.run([*RUN, str(ROOT / "examples/lighthouse.txt"), "-n", "4", "--json"], capture_output=True)
    found = json.loads(done.stdout)
    planned, measured = found["plan"]["bytes"]["peak"], found["memory"]["process_peak_bytes"]
    assert abs(measured - planned) <= max(planned // 10, 100 << 20)
    live = planned - found["plan"]["bytes"]["reserve"]
    transient = live - found["plan"]["bytes"]["weights"]
    assert abs(found["memory"]["live_peak_bytes"] - live) <= transient / 100


def test_a_hang_up_that_is_ignored_stays_so(document: str) -> None:
    """As under nohup: what outlives its terminal still answers."""
    command = ["nohup", *RUN, document, "-n", "2", "-q"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    time.sleep(2)
    process.send_signal(signal.SIGHUP)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0 and out.strip()


def _hear_hang_ups() -> None:
    """Also where the tests run under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGKILL])
def test_what_is_verified_ends_with_the_probe(embedded_path: Path, number: int) -> None:
    command = [sys.executable, "-m", "tidekv_cli", "probe-capacity", "--memory-limit", "1100MiB", "--verify"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=_hear_hang_ups)
    deadline = time.monotonic() + 60
    while not (children := psutil.Process(process.pid).children()) and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1)  # it asks the system to be ended before it does anything else
    process.send_signal(number)
    process.communicate(timeout=60)
    assert children and process.returncode in (128 + number, -number)
    gone, alive = psutil.wait_procs(children, timeout=10)
    assert gone and not alive


def test_a_probe_takes_little_time(tmp_path: Path) -> None:
    """Under 8 s of CPU time the first time, under 4 s from its cache; one run each, on a machine of its own."""
    command = [sys.executable, "-m", "tidekv_cli", "probe-capacity", "-m", "llama-3.1-8b", "--profile", "rtx-4090"]
    taken = []
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, capture_output=True, env={**os.environ, "TIDEKV_CACHE_DIR": str(tmp_path)})
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert taken[0] < 8 and taken[1] < 4
