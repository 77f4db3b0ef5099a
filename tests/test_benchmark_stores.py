"""The benchmark of stores, as briefly as it can be run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parent.parent / "benchmarks" / "stores.py"


@pytest.mark.slow
def test_it_prints_every_shape_and_the_model() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--quick", "--model", "--threads", "1"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[:4] for line in lines[1:7]] == [
        [*shape, rows] for shape in (["3", "3", "64"], ["8", "4", "128"]) for rows in ("1024", "2048", "4096")
    ]
    assert [line.split()[0] for line in lines[8:]] == ["flat", "quantized"]
