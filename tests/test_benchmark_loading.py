"""The benchmark of loading, on the smallest checkpoint that it makes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parent.parent / "benchmarks" / "loading.py"


@pytest.mark.slow
def test_it_measures_a_process_of_its_own() -> None:
    command = [sys.executable, str(BENCHMARK), "--gigabytes", "0.1", "--shards", "3", "--dtype", "float32"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["weights_bytes"] == 2 * found["stored_bytes"] >= 2e8
    assert found["process_peak_bytes"] > found["weights_bytes"] + found["baseline_bytes"] // 2
    assert 0.9 < found["growth_over_weights"] < found["bar"] < found["process_peak_over_weights"]
