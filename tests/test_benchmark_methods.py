"""The table of docs/methods.md can be made again."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT

BENCHMARK = ROOT / "benchmarks" / "methods.py"


@pytest.mark.slow
def test_it_measures_what_was_planned() -> None:
    page = (ROOT / "docs" / "methods.md").read_bytes()
    small = ("--methods", "tidekv-snapkv,h2o", "--tokens", "200", "--budget", "64", "--rounds", "2")
    done = subprocess.run([sys.executable, str(BENCHMARK), *small], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = re.findall(
        r"^\| `([a-z0-9-]+)` \| .* \| ([\d.]+) \| ([\d.]+) \| [\d.]+ \| [\d.]+ \|$", done.stdout, re.MULTILINE
    )
    assert [name for name, _, _ in rows] == ["tidekv-snapkv", "h2o"]
    assert all(float(peak) == pytest.approx(float(planned), rel=0.01) for _, peak, planned in rows)
    assert (ROOT / "docs" / "methods.md").read_bytes() == page
