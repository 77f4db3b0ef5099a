"""A built wheel carries the profiles and works in an empty environment."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT

# What `tidekv profiles` imports; torch and the rest are not needed for it, which is part of the promise.
LIGHT = ("typer", "rich", "pyyaml", "psutil")


@pytest.mark.slow
def test_profiles_reach_the_wheel(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {f"tidekv_cli/profiles/{path.name}" for path in (ROOT / "profiles").glob("*.yaml")} <= set(names)
    assert not [name for name in names if name.startswith(("tests", "benchmarks"))]
    venv.create(tmp_path / "empty", with_pip=True)
    pip = [str(tmp_path / "empty/bin/pip"), "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", str(wheel)], check=True, capture_output=True)
    subprocess.run([*pip, *LIGHT], check=True, capture_output=True)
    for arguments, word in ((["profiles"], "generic-cuda"), (["profiles", "cpu"], "chunk_size"), (["--version"], "0.")):
        done = subprocess.run(
            [str(tmp_path / "empty/bin/tidekv"), *arguments], capture_output=True, text=True, cwd=tmp_path
        )
        assert done.returncode == 0 and word in done.stdout, done.stderr
