"""The commands that list things, and that help and version stay light."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli_runner import run_cli
from tidekv_cli import __version__
from tidekv_cli.axes import POLICIES, SCHEDULES, SELECTORS, STORES
from tidekv_cli.methods import METHODS

LIGHT = (["--help"], ["--version"], ["profiles"], ["methods"], ["models", "list"])


def test_version_profiles_methods_models() -> None:
    assert run_cli("--version").out == f"tidekv {__version__}\n"
    assert {"cpu", "generic-cuda"} <= {line.split()[0] for line in run_cli("profiles").out.splitlines()[1:]}
    shown = run_cli("profiles", "cpu").out
    assert "chunk_size" in shown and "cpu.yaml" in shown and "reserve.process" in shown
    listed = run_cli("methods").out
    assert all(name in listed for name in (*METHODS, *SCHEDULES, *SELECTORS, *POLICIES, *STORES))
    assert "smollm2-135m (default)" in run_cli("models", "list").out
    run_cli("profiles", "toaster").assert_error(2, "toaster")
    run_cli("models", "pull", "toaster").assert_error(3, "toaster")


def test_models_path_prints_what_is_loaded(embedded_path: Path, tmp_path: Path) -> None:
    assert run_cli("models", "path").out == f"{embedded_path}\n"
    assert run_cli("models", "path", str(tmp_path)).out == f"{tmp_path}\n"
    run_cli("models", "path", environ={"TIDEKV_CACHE_DIR": str(tmp_path)}).assert_error(3, "not on disk")


@pytest.mark.parametrize("arguments", LIGHT, ids=" ".join)
def test_torch_is_not_imported(arguments: list[str]) -> None:
    program = (
        "import sys\nfrom tidekv_cli.cli import main\nfrom tidekv_cli.environment import Environment\n"
        f"code = main({arguments!r}, Environment.of_process())\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules), 'heavy import'\nsys.exit(int(code))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_start_up_takes_under_0_4_s_of_cpu_time(flag: str) -> None:
    def cpu_seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "tidekv_cli", flag], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(cpu_seconds() for _ in range(5)) < 0.4
