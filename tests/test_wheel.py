"""The wheel carries what the package needs, and the installed command works away from the sources."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import tidekv_cli

ROOT = Path(__file__).parent.parent
# What `tidekv profiles` imports; the rest of the dependencies is large and needed only by `run`.
NEEDED = ("typer", "rich", "pyyaml", "psutil")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from this source tree."""
    place = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(place), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=place)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = place.glob("*.whl")
    return built


@pytest.mark.slow
def test_what_is_inside(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for profile in (ROOT / "profiles").glob("*.yaml"):
        assert f"tidekv_cli/profiles/{profile.name}" in names
    for shape in (ROOT / "tidekv_cli" / "shapes").glob("*.json"):
        assert f"tidekv_cli/shapes/{shape.name}" in names
    for module in (ROOT / "tidekv_cli").rglob("*.py"):
        assert module.relative_to(ROOT).as_posix() in names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", "examples/"))]
    assert wheel.name.startswith(f"tidekv_cli-{tidekv_cli.__version__}-py3-none-any")


@pytest.mark.slow
def test_the_installed_command(wheel: Path, tmp_path: Path) -> None:
    home = tmp_path / "venv"
    venv.create(home, with_pip=True)
    python, command = str(home / "bin" / "python"), str(home / "bin" / "tidekv")
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for arguments in (["--no-deps", str(wheel)], list(NEEDED)):
        done = subprocess.run([*install, *arguments], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "TIDEKV_PROFILE_DIR")
    environ = {key: value for key, value in os.environ.items() if key not in hidden}

    def run(*arguments: str) -> str:
        done = subprocess.run([command, *arguments], capture_output=True, text=True, cwd=tmp_path, env=environ)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        return done.stdout

    listed = run("profiles")
    assert "cpu" in listed and "generic-cuda" in listed
    assert "rtx-4090" in listed and "jetson-agx-thor" in listed
    assert str(home) in run("profiles", "cpu")  # not the source tree's
    shape = "from tidekv_cli.catalog import shape_of; print(shape_of('qwen3-8b')['num_hidden_layers'])"
    done = subprocess.run([python, "-c", shape], capture_output=True, text=True, cwd=tmp_path, env=environ)
    assert done.stdout == "36\n", done.stderr
    assert tidekv_cli.__version__ in run("--version")
