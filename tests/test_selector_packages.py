"""Selectors of other packages: the worked example, installed, and packages that cannot be used."""

from __future__ import annotations

import re
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


def offer(place: Path, name: str, target: str, package: str | None = None) -> None:
    """A distribution that offers a selector; called as the selector is, unless given."""
    package = package or name
    about = place / f"{package}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n", encoding="utf-8")
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


@pytest.mark.parametrize(
    ("saying", "words"),
    [
        ("parameters=(Parameter('soft', True, 'x'),)", "default True is none of"),
        ("parameters=(Parameter('bits', 4, 'x'),)", "parameter bits, which is another's"),
        ("parameters=(Parameter('a', 4, 'x'), Parameter('a', 5, 'x'))", "parameter a, which is another's"),
        ("parameters=({'name': 'a'},)", "AttributeError"),
        ("scores='heads'", "scores 'heads', which is none of"),
        ("schedules=('tide', 'sideways')", "'sideways'"),
        ("schedules=()", "schedules ()"),
    ],
)
def test_what_a_package_says_of_its_selector_is_checked(
    saying: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"odd{abs(hash(saying))}"  # modules stay imported
    head = "from tidekv_cli.axes import Parameter, SelectorInfo\n"
    (tmp_path / f"{name}.py").write_text(f"{head}X = SelectorInfo('{name}', 'a:B', {saying})\n", encoding="utf-8")
    offer(tmp_path, name, f"{name}:X")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UsageError, match=re.escape(words)) as caught:
        selector_info(name)
    assert name in caught.value.message
    run_cli("run", "x.txt", "--selector", name).assert_error(2, name)
    assert run_cli("methods").err.count("warning: ") == 1


def test_two_packages_that_offer_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(tmp_path, "twice", "first:X", "first")
    offer(tmp_path, "twice", "second:X", "second")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UsageError, match="name of another"):
        selector_info("twice")
    assert selector_names().count("twice") == 1
    assert "twice" not in run_cli("methods").out


CODE = """
import torch
from dataclasses import dataclass
from tidekv_cli.axes import Parameter, SelectorInfo
from tidekv_cli.engine.selectors import Ranking, Selection, Selector

class Greedy(Selector):
    def rank(self, view, budget):
        return Ranking(30, 40, iter([torch.zeros(view.keys.shape[0], 10)]))

class Miscounting(Selector):
    def select(self, view, budget):
        return Selection(torch.arange(budget - 1).expand(view.keys.shape[0], -1))

class Failing(Selector):
    def rank(self, view, budget):
        return [][7]

class Repeating(Selector):
    def select(self, view, budget):
        return Selection(torch.zeros(view.keys.shape[0], budget, dtype=torch.long))

class Half(Selector):
    def rank(self, view, budget):
        heads, length, _ = view.keys.shape
        return Ranking(0, length - 1, iter([torch.rand(heads, length - 1, dtype=torch.bfloat16)]))

class Other:
    window, rolling = 0, None

failing = SelectorInfo("failing", "unruly:Failing", scores="head")
blind = SelectorInfo("blind", "unruly:Half", scores="head", windowed=True)
half = SelectorInfo("half", "unruly:Half", scores="head")
repeating = SelectorInfo("repeating", "unruly:Repeating")
other = SelectorInfo("other", "unruly:Other")
rolling = SelectorInfo("rolling", "unruly:Half", scores="head", rolling=True)
lacking = SelectorInfo("lacking", "unruly:Half", parameters=(Parameter("a", 1, "x"),))
untargeted = SelectorInfo("untargeted", "nowhere")
greedy = SelectorInfo("greedy", "unruly:Greedy", scores="head")
miscounting = SelectorInfo("miscounting", "unruly:Miscounting")
"""


@pytest.mark.parametrize(
    ("name", "policy", "words"),
    [
        ("greedy", "uniform", "always keeps"),
        ("greedy", "ada", "always keeps"),
        ("failing", "uniform", "Failing fails: IndexError"),
        ("blind", "cake", "does not look at"),
        ("other", "uniform", "Other is no Selector"),
        ("lacking", "uniform", "TypeError"),
        ("untargeted", "uniform", "nowhere"),
        ("miscounting", "uniform", "keeps 39 rows a head, and the budget is 40"),
    ],
)
def test_selectors_that_keep_other_than_they_were_told_to(
    name: str, policy: str, words: str, tiny_directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "unruly.py").write_text(CODE, encoding="utf-8")
    offer(tmp_path, name, f"unruly:{name}")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "doc.txt").write_text("The tide turns twice a day. " * 12, encoding="utf-8")
    run = ("run", str(tmp_path / "doc.txt"), "-m", tiny_directory, "--raw", "-n", "4", "--budget", "40")
    for more in ((), ("--dry-run",)):
        result = run_cli(*run, "--selector", name, "--budget-policy", policy, "--kv-store", "flat", *more)
        result.assert_error(2, words)


def test_rows_that_repeat_and_scores_of_another_type(
    tiny_directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "unruly.py").write_text(CODE, encoding="utf-8")
    (tmp_path / "doc.txt").write_text("The tide turns twice a day. " * 12, encoding="utf-8")
    for name in ("repeating", "half", "rolling"):
        offer(tmp_path, name, f"unruly:{name}")
    monkeypatch.syspath_prepend(str(tmp_path))
    run = ("run", str(tmp_path / "doc.txt"), "-m", tiny_directory, "--raw", "-n", "4", "--budget", "40", "--json")
    run_cli(*run, "--selector", "rolling").assert_error(2, "rolling is True")
    run_cli(*run, "--selector", "rolling", "--budget-policy", "cake").assert_error(2)
    assert "do not ascend" in run_cli(*run, "--selector", "repeating").err
    for policy in ("uniform", "ada"):
        result = run_cli(*run, "--selector", "half", "--budget-policy", policy, "--kv-store", "flat")
        assert result.code == 0, result.err
