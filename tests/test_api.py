"""The Python API: the page in docs/ as printed, and what it promises on a tiny model."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tidekv_cli
from tidekv_cli import open_model
from tidekv_cli.errors import DoesNotFitError, InputError, UsageError, WindowError

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.slow
def test_ten_lines_as_printed() -> None:
    assert len(BLOCKS[0].strip().splitlines()) <= 11, "ten, and an empty one"
    done = subprocess.run([sys.executable, "-c", BLOCKS[0]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    first, *answer, last = done.stdout.splitlines()
    assert re.fullmatch(r"[\d.]+ GiB of [\d.]+ GiB free", first) and re.fullmatch(r"\d+ MiB live at most", last)
    assert len(" ".join(answer)) > 40


@pytest.mark.slow
def test_the_rest_of_the_page_as_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {}
    exec("from pathlib import Path\nfrom tidekv_cli import open_model\n", names)
    for block in BLOCKS[1:]:
        exec(block, names)


@pytest.fixture
def tiny(tiny_directory: str) -> Any:
    """Opens the tiny model with settings."""
    quiet = {"XDG_CONFIG_HOME": "/nonexistent"}
    return lambda **settings: open_model(tiny_directory, device="cpu", environ=quiet, **settings)


TEXT = "one two three four five six seven eight nine ten " * 30


def test_a_run_from_plan_to_report(tiny: Any) -> None:
    model = tiny(budget=40, chunk_size=32, max_new_tokens=6, parameters={"window": 8})
    run = model.plan(TEXT, "what?", record_kept=True)
    assert run.plan.fits and run.kept == [] and run.report()["result"]["finish_reason"] is None
    pieces = list(run.generate())
    assert "".join(pieces) == run.outcome.text == run.report()["result"]["text"]
    assert [kept.shape[1] for kept in run.kept] == [40] * model.files.spec.layers
    assert run.report()["memory"]["live_peak_bytes"] > 0
    assert run.report()["timing_s"]["total"] > run.report()["timing_s"]["prefill"]
    before = run.report()
    for again in (run.generate, run.tokens, run.prefill):
        with pytest.raises(UsageError, match="already"):
            again()
    assert run.report() == before


def test_tokens_and_text_agree(tiny: Any) -> None:
    model = tiny(budget=40, max_new_tokens=6, parameters={"window": 8})
    tokens = list(model.plan(TEXT).tokens())
    again = model.plan_tokens(model.plan(TEXT).token_ids)
    assert list(again.tokens()) == tokens and again.outcome.load_s == 0.0, "weights are loaded once"
    ended = ("length", "stop")[len(tokens) < 6]
    assert again.outcome.finish_reason == ended


def test_an_answer_that_is_left_is_interrupted(tiny: Any) -> None:
    run = tiny(budget="full", max_new_tokens=20).plan(TEXT)
    pieces = run.generate()
    first = next(pieces)
    pieces.close()
    assert run.outcome.finish_reason == "interrupted" and run.outcome.text.startswith(first)


def test_what_is_looked_at_tells_no_secrets(tiny_directory: str) -> None:
    model = open_model(tiny_directory, device="cpu", environ={"HF_TOKEN": "hf_secret", "XDG_CONFIG_HOME": "/none"})
    assert "hf_secret" not in repr(model.setup) and len(repr(model.files)) < 10_000


def test_one_token_is_an_answer_too(tiny: Any) -> None:
    run = tiny(budget=40, max_new_tokens=1, parameters={"window": 8}).plan(TEXT)
    assert len(list(run.tokens())) <= 1
    with pytest.raises(UsageError, match="already"):
        run.generate()


def test_runs_of_one_model_go_on_in_turns(tiny: Any) -> None:
    model = tiny(budget=40, chunk_size=32, max_new_tokens=6, parameters={"window": 8})
    texts = TEXT, TEXT[40:]
    alone = [list(model.plan(text).tokens()) for text in texts]
    runs = [model.plan(text) for text in texts]
    for run in runs:
        run.prefill()
    turns = [run.tokens() for run in runs]
    mixed = [[next(tokens, None) for tokens in turns] for _ in range(6)]
    assert [[pair[n] for pair in mixed if pair[n] is not None] for n in (0, 1)] == alone


def test_sampling_is_repeatable(tiny: Any) -> None:
    model = tiny(budget=40, max_new_tokens=12)
    texts = ["".join(model.plan(TEXT).generate(temperature=1.5, seed=seed)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    with pytest.raises(UsageError):
        model.plan(TEXT).generate(temperature=-1)


def test_what_cannot_be(tiny: Any) -> None:
    for settings in ({"budget": 3}, {"chunk_size": 0}, {"attention": "flash-attn"}, {"parameters": {"x": 1}}):
        with pytest.raises(UsageError):
            tiny(**settings)
    with pytest.raises(TypeError):
        tiny(budgett=3)
    model = tiny(max_new_tokens=4)
    with pytest.raises(InputError, match="not one token"):
        model.plan_tokens([])
    for wrong in (99999, -1):
        with pytest.raises(UsageError, match=f"token {wrong} is not known"):
            model.plan_tokens([1, wrong])
    for document in (b"bytes", Path("file")):
        with pytest.raises(UsageError, match="document 1 is not text"):
            model.plan([document])
    for empty in ("", " \n", ["some", ""]):
        with pytest.raises(InputError, match="holds no text"):
            model.plan(empty)
    for half in ({"documents": "\ud800"}, {"documents": TEXT, "question": "\udfff"}, {"documents": TEXT, "system": 3}):
        with pytest.raises(UsageError, match="text"):
            model.plan(**half)
    for ids in ([[1, 2], [3, 4]], ["x"], [None]):
        with pytest.raises(UsageError, match="whole numbers"):
            model.plan_tokens(ids)
    for sampling in ({"seed": 1.5}, {"stop": ""}, {"stop": ["x", ""]}):
        with pytest.raises(UsageError):
            model.plan(TEXT).generate(**sampling)
    with pytest.raises(UsageError, match=r"2\.5"):
        tiny(max_new_tokens=2.5)
    with pytest.raises(UsageError, match="truncate ends"):
        model.plan(TEXT, truncate="ends")
    with pytest.raises(WindowError):
        model.plan(TEXT * 1000).check()
    with pytest.raises(DoesNotFitError):
        tiny(memory_limit="1MiB").plan(TEXT).prefill()


def test_warnings_are_told_and_reported(tiny: Any) -> None:
    told: list[str] = []
    model = tiny(max_new_tokens=4, warn=told.append)
    run = model.plan(TEXT, raw=True, template_arguments={"x": 1})
    assert len(told) == 1 and run.report()["warnings"] == told
    assert model.plan(TEXT, raw=True).report()["warnings"] == [], "each run has its own"


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = (
        "import sys, tidekv_cli; assert not {'torch', 'transformers', 'rich'} & set(sys.modules); tidekv_cli.open_model"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert not hasattr(tidekv_cli, "no_such_name")
