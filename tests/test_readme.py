"""The commands of the README and of docs/methods.md run, and their tables say what the program does."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from tests.cli_runner import run_cli
from tests.conftest import ROOT
from tidekv_cli.errors import ExitCode
from tidekv_cli.methods import METHODS, choose

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```sh\n(.*?)```", README + PAGE, re.DOTALL)
COMMANDS = [line.split("  #")[0].strip() for block in BLOCKS for line in block.splitlines() if "tidekv run" in line]


OTHERS = [
    line.split("  #")[0].strip()
    for block in BLOCKS
    for line in block.splitlines()
    if line.startswith(("tidekv probe-capacity", "tidekv devices"))
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, embedded_tokenizer: Any) -> Path:
    """A directory with every file that the README names."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    config = LlamaConfig(vocab_size=49152, num_hidden_layers=2, architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path / "my-model")
    embedded_tokenizer.save_pretrained(tmp_path / "my-model")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_there_are_commands() -> None:
    assert len(COMMANDS) >= 6 and len(OTHERS) >= 4


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command: str, folder: Path, embedded_path: Path) -> None:
    before, pipe, after = command.rpartition("|")
    words = shlex.split(after if pipe else command)
    assert words[0] == "tidekv"
    result = run_cli(*words[1:], "--dry-run", stdin=b"A piped document." if before else b"")
    assert result.code == 0, result.err


@pytest.mark.slow
@pytest.mark.parametrize("command", OTHERS)
def test_other_commands_run(command: str, embedded_path: Path) -> None:
    words = [word for word in shlex.split(command)[1:] if word != "--verify"]  # tests/test_cli_probe.py runs that
    result = run_cli(*words)
    assert result.code == 0 and result.out, result.err


def test_every_method_is_in_the_table_of_what_was_measured() -> None:
    table = PAGE.partition("<!-- measured by benchmarks/methods.py -->")[2].partition("<!-- end -->")[0]
    rows = re.findall(r"^\| `([a-z0-9-]+)` \| (.*) \|$", table, re.MULTILINE)
    assert [name for name, _ in rows] == list(METHODS)
    for name, row in rows:
        axes, *figures = row.split(" | ")
        assert axes == " × ".join(METHODS[name].axes)
        assert len(figures) == 4 and all(float(figure) > 0 for figure in figures)


def test_every_system_has_a_row_whose_flags_can_be() -> None:
    rows = re.findall(r"^\| (.+?) \| (works|planned|out of scope) \| (.+) \|$", PAGE, re.MULTILINE)
    assert len(rows) > 25
    reached = set()
    for system, state, how in rows:
        flags = [shlex.split(found) for found in re.findall(r"`(--method [^`]*)`", how)]
        assert bool(flags) == (state == "works"), system
        for words in flags:
            given = dict(zip(words[::2], words[1::2], strict=True))
            method = choose(given["--method"], None, None, None, given.get("--kv-store"))
            key, _, value = given.get("--set", "").partition("=")
            method.settings({key: value} if key else {})
            reached.add(method.name)
    assert {name for name in METHODS if not name.startswith("tidekv-")} <= reached | {"streaming"}


def test_exit_codes_are_listed() -> None:
    listed = {int(code) for row in re.findall(r"^\| ([\d, ]+) \|", README, re.MULTILINE) for code in row.split(",")}
    assert listed == {int(code) for code in ExitCode}


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"make ([a-z-]+)", README)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("profile", ["rtx-4090", "jetson-agx-orin-32gb", "jetson-orin-nano-8gb"])
def test_the_table_of_largest_contexts_is_of_this_version(profile: str) -> None:
    (row,) = re.findall(rf"^\| `{profile}` \| (.*) \|$", README, re.MULTILINE)
    stated = [cell.strip() for cell in row.split("|")]
    result = run_cli("probe-capacity", "-m", "llama-3.1-8b", "--profile", profile, "--json", "--offline")
    if stated[1] == "does not fit":
        result.assert_error(4)
        return
    found = result.document
    assert stated[1] == f"{found['max_context_tokens']:,} ({found['limited_by']})"
    assert stated[2] == f"{found['memory_context_tokens']:,}"
