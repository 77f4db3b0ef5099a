"""The benchmark for GPUs, end to end on the CPU, so that it does not rot where there is none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parent.parent / "benchmarks" / "gpu.py"


@pytest.mark.slow
def test_it_runs_on_a_cpu_and_misses_nothing(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    command = [sys.executable, str(BENCHMARK), "--small", "--device", "cpu", "--json", str(result)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(result.read_text(encoding="utf-8"))
    assert found["missed"] == [] and found["on"]["device"] == "cpu"
    assert {row["backend"] for row in found["exactness"]} == {"sdpa", "math", "eager"}
    assert found["kept_sets"][0]["score_blocks"] == [0, 0, 0] and found["oom_ladder"]["lowered"]
    assert [row["ran"] for row in found["plan"]] == [True, True] and len(found["speed"]) == 2


@pytest.mark.slow
def test_shapes_for_a_gpu_are_not_tried_on_a_cpu() -> None:
    done = subprocess.run([sys.executable, str(BENCHMARK), "--device", "cpu"], capture_output=True, text=True)
    assert done.returncode == 2 and "--small" in done.stderr and "Traceback" not in done.stderr
    done = subprocess.run([sys.executable, str(BENCHMARK), "--device", "cuda:99"], capture_output=True, text=True)
    assert done.returncode == 8 and "error: " in done.stderr and "Traceback" not in done.stderr
