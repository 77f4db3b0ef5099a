"""Models that do not belong together, or hold no numbers, at the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.builders import tiny_causal_model, write_hugging_face
from tests.cli_runner import run_cli


@pytest.fixture
def document(tmp_path: Path) -> str:
    path = tmp_path / "tides.txt"
    path.write_text("The tide turns twice a day, and the harbour with it.\n", encoding="utf-8")
    return str(path)


def test_a_tiny_model_answers(document: str, tmp_path: Path) -> None:
    path = write_hugging_face(tmp_path / "model", tiny_causal_model(vocab_size=512))
    result = run_cli("run", document, "-m", str(path), "-n", "8", "--budget", "40", "--json")
    assert result.code == 0 and result.document["result"]["tokens"] > 0, result.err


def test_a_tokenizer_of_another_model(document: str, tmp_path: Path) -> None:
    path = write_hugging_face(tmp_path / "model", tiny_causal_model(vocab_size=96))
    run_cli("run", document, "-m", str(path)).assert_error(3, str(path), "knows 96")


def test_weights_that_are_no_numbers(document: str, tmp_path: Path) -> None:
    model = tiny_causal_model(vocab_size=512)
    model.model.norm.weight.fill_(float("nan"))
    path = write_hugging_face(tmp_path / "model", model)
    run_cli("run", document, "-m", str(path)).assert_error(3, "not finite")


def test_the_traceback_of_a_named_error(document: str, tmp_path: Path) -> None:
    path = write_hugging_face(tmp_path / "model", tiny_causal_model(vocab_size=512))
    (path / "tokenizer.json").write_text("{", encoding="utf-8")
    result = run_cli("run", document, "-m", str(path), environ={"TIDEKV_TRACEBACK": "1"})
    assert result.code == 3 and "Traceback" in result.err and "error: the tokenizer in" in result.err
