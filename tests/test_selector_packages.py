"""Selectors of other packages: the worked example, installed, and packages that cannot be used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli_runner import run_cli
from tests.conftest import ROOT
from tidekv_cli.axes import selector_info, selector_infos, selector_names
from tidekv_cli.errors import UsageError

EXAMPLE = ROOT / "examples" / "selector-package"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the example is installed."""
    place = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(place), str(EXAMPLE)], check=True, capture_output=True)
    return place


def offer(place: Path, name: str, target: str) -> None:
    """A distribution that offers a selector."""
    about = place / f"{name}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
    (about / "entry_points.txt").write_text(f"[tidekv.selectors]\n{name} = {target}\n", encoding="utf-8")


def test_the_example_is_a_selector_like_any_other(
    installed: Path, tiny_directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(installed))
    (tmp_path / "doc.txt").write_text("The tide turns twice a day. " * 12, encoding="utf-8")
    run = ("run", str(tmp_path / "doc.txt"), "-m", tiny_directory, "--raw", "-n", "4", "--chunk-size", "64", "--json")
    for policy, store in (("uniform", "dense"), ("ada", "flat"), ("pyramid", "quantized")):
        axes = ("--selector", "middle", "--budget-policy", policy, "--kv-store", store, "--set", "window=4")
        result = run_cli(*run, *axes, "--budget", "40")
        assert result.code == 0, result.err
        assert result.document["plan"]["selector"] == "middle"
        assert sum(result.document["memory"]["cache_tokens_per_layer"]) == 40 * result.document["model"]["layers"]
        found = result.document
        assert found["memory"]["live_peak_bytes"] == found["plan"]["bytes"]["peak"] - found["plan"]["bytes"]["reserve"]
    run_cli(*run, "--selector", "middle", "--budget", "2").assert_error(2, "always keeps")
    run_cli(*run, "--selector", "middle", "--budget-policy", "cake").assert_error(2, "scores from the last queries")
    assert "middle" in run_cli("methods").out and "middle" in run_cli("methods", "--json").out


def test_packages_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.py").write_text("raise RuntimeError('not today')\n", encoding="utf-8")
    (tmp_path / "other.py").write_text("THING = 3\n", encoding="utf-8")
    for name, target in (
        ("broken", "broken:X"),
        ("absent", "nowhere:X"),
        ("other", "other:THING"),
        ("lacking", "other:NONE"),
        ("snapkv", "broken:X"),
    ):
        offer(tmp_path, name, target)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, words in (
        ("broken", "not today"),
        ("absent", "nowhere"),
        ("other", "no SelectorInfo"),
        ("lacking", "NONE"),
    ):
        with pytest.raises(UsageError, match=words):
            selector_info(name)
        assert name in selector_names()
        run_cli("run", "x.txt", "--selector", name).assert_error(2, name)
    info = selector_info("snapkv")
    assert info is not None and info.source.startswith("Li et al."), "a name of this package's own stays its own"
    assert len(selector_infos()[1]) == 4
    listed = run_cli("methods")
    assert listed.code == 0 and listed.err.count("warning: selector ") == 4
