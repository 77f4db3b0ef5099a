"""`tidekv run` on the embedded model: streams, JSON, kept positions, truncation, sampling, interruption."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli_runner import run_cli
from tidekv_cli.cli import main
from tidekv_cli.environment import Environment

TEXT = (
    "The harbour master of Vell kept a green ledger. Every ship that came in was written there with its cargo, "
    "its captain and the state of the tide. In the spring of 1911 a storm took the pier, and the ledger with it. "
)
QUESTION = ("-p", "What did the harbour master keep?")


@pytest.fixture
def document(tmp_path: Path, embedded_path: Path) -> str:
    path = tmp_path / "harbour.txt"
    path.write_text(TEXT * 6, encoding="utf-8")
    return str(path)


def test_answer_on_stdout_report_on_stderr(document: str) -> None:
    result = run_cli("run", document, *QUESTION, "-n", "12")
    assert result.code == 0, result.err
    assert result.out.endswith("\n") and not result.out.endswith("\n\n") and result.out.strip()
    for item in ("weights", "final cache", "hidden bridge", "active-layer KV", "predicted peak", "headroom"):
        assert item in result.err
    assert "maximum feasible context" in result.err
    assert "\x1b" not in result.err + result.out


def test_quiet_and_no_stream_give_the_same_answer(document: str) -> None:
    loud = run_cli("run", document, *QUESTION, "-n", "8")
    quiet = run_cli("run", document, *QUESTION, "-n", "8", "-q", "--no-stream")
    assert quiet.err == ""
    assert quiet.out == loud.out


def test_json_document(document: str) -> None:
    result = run_cli("run", document, "-", *QUESTION, "-n", "8", "--json", "--budget", "128", stdin=TEXT.encode())
    found = result.document
    assert result.code == 0
    assert found["plan"]["budget_tokens"] == 128
    assert found["plan"]["bytes"]["peak"] == sum(n for key, n in found["plan"]["bytes"].items() if key != "peak")
    assert [entry["path"] for entry in found["prompt"]["documents"]] == [document, "-"]
    in_documents = sum(entry["tokens"] for entry in found["prompt"]["documents"])
    assert 0 < in_documents < found["prompt"]["tokens"] == found["plan"]["prompt_tokens"]
    assert found["memory"]["cache_tokens_per_layer"] == [128] * 30
    # K rows and the slack for new tokens, of K and of V, 3 heads of 64 in float32
    assert found["memory"]["cache_bytes"] == 30 * (128 + 8) * 2 * 3 * 64 * 4
    assert found["plan"]["bytes"]["cache"] <= found["memory"]["cache_bytes"]
    # The plan is the program: what was measured is what was predicted.
    planned = found["plan"]["bytes"]["peak"] - found["plan"]["bytes"]["reserve"]
    assert found["memory"]["live_peak_bytes"] == pytest.approx(planned, rel=0.001)
    assert found["memory"]["live_peak_bytes"] > found["plan"]["bytes"]["weights"]
    assert found["memory"]["allocated_peak_bytes"] is None
    assert found["result"]["finish_reason"] in ("stop", "length")
    assert found["timing_s"]["scoring"] < found["timing_s"]["prefill"] <= found["timing_s"]["first_token"]
    assert found["memory"]["live_peak_bytes"] <= found["plan"]["bytes"]["peak"] - found["plan"]["bytes"]["reserve"]


def test_kept_positions(document: str, tmp_path: Path) -> None:
    target = tmp_path / "kept.npz"
    result = run_cli("run", document, *QUESTION, "-n", "1", "--json", "--budget", "100", "--kept", str(target))
    kept = np.load(target)
    assert len(kept["prompt_ids"]) == result.document["prompt"]["tokens"]
    assert sorted(kept.files) == sorted(["prompt_ids", *(f"layer_{layer:03d}" for layer in range(30))])
    for layer in range(30):
        rows = kept[f"layer_{layer:03d}"]
        assert rows.shape == (3, 100) and rows.dtype == np.int64
        assert (np.diff(rows, axis=1) > 0).all()
        assert (rows[:, -32:] == np.arange(len(kept["prompt_ids"]))[-32:]).all()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("where", ["head", "tail", "middle"])
def test_truncation_reports_what_was_dropped(tmp_path: Path, where: str, embedded_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text(TEXT * 220, encoding="utf-8")
    result = run_cli("run", str(path), *QUESTION, "--truncate", where, "--dry-run", "--json")
    found = result.document
    assert result.code == 0
    assert found["prompt"]["tokens"] == 8192 - found["plan"]["max_new_tokens"]
    assert found["prompt"]["truncated_tokens"] > 1000
    assert f"{found['prompt']['truncated_tokens']} document tokens were dropped" in result.err
    assert found["warnings"]


def test_memory_limit_truncates_to_what_fits(document: str) -> None:
    settings = ("--budget", "64", "-n", "8", "--dry-run", "--json", "--chunk-size", "64", "--score-block", "64")
    peak = run_cli("run", document, *settings).document["plan"]["bytes"]["peak"]
    limit = ("--memory-limit", str(peak - 100_000))
    refused = run_cli("run", document, *settings, *limit)
    assert refused.document["error"]["code"] == 4
    cut = run_cli("run", document, *settings, *limit, "--truncate", "tail").document
    assert cut["prompt"]["truncated_tokens"] > 0
    assert cut["plan"]["headroom_bytes"] >= 0


def test_memory_that_runs_out_in_the_prefill(document: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: object, **__: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr("tidekv_cli.engine.session.Session.prefill", exhausted)
    run_cli("run", document).assert_error(7, "memory ran out with a predicted peak of", "9 bytes")


def test_memory_that_others_take_meanwhile(document: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidekv_cli.room.Room.shortage", lambda self, tokens: f"no room for {tokens} tokens")
    run_cli("run", document).assert_error(7, "no room for")


def test_beyond_the_window_only_warns_when_allowed(document: str) -> None:
    result = run_cli("run", document, "-n", "9000", "--allow-beyond-window", "--dry-run")
    assert result.code == 0
    assert "warning: " in result.err and "8192" in result.err


@pytest.mark.parametrize("schedule", ["tide", pytest.param("oneshot", marks=pytest.mark.slow)])
@pytest.mark.parametrize("selector", ["snapkv", "recent", "streaming", "all"])
def test_every_method_answers(document: str, schedule: str, selector: str) -> None:
    budget = [] if selector == "all" else ["--budget", "96"]
    result = run_cli(
        "run", document, *QUESTION, "-n", "4", "--json", "--schedule", schedule, "--selector", selector, *budget
    )
    assert result.code == 0, result.err
    tokens = set(result.document["memory"]["cache_tokens_per_layer"])
    assert tokens == ({result.document["prompt"]["tokens"]} if selector == "all" else {96})


def test_budget_full_and_auto(document: str) -> None:
    full = run_cli("run", document, *QUESTION, "-n", "4", "--json", "--budget", "full").document
    assert set(full["memory"]["cache_tokens_per_layer"]) == {full["prompt"]["tokens"]}
    auto = run_cli("run", document, *QUESTION, "-n", "4", "--json", "--budget", "auto").document
    assert auto["plan"]["budget_tokens"] == auto["prompt"]["tokens"]
    assert auto["result"]["text"] == full["result"]["text"]


@pytest.mark.slow
def test_sampling_follows_the_seed(document: str) -> None:
    sampled = ("run", document, *QUESTION, "-n", "12", "--temperature", "1.5", "--top-p", "0.95", "--seed")
    first, again, other = (run_cli(*sampled, seed) for seed in ("1", "1", "2"))
    assert first.out == again.out
    assert first.out != other.out


def test_stop_string_across_tokens(document: str) -> None:
    whole = run_cli("run", document, *QUESTION, "-n", "16", "-q").out.strip()
    stop = whole[len(whole) // 3 : len(whole) // 3 + 9]
    result = run_cli("run", document, *QUESTION, "-n", "16", "--json", "--stop", stop).document["result"]
    assert result["text"] == whole[: whole.index(stop)]
    assert result["finish_reason"] == "stop"


@pytest.mark.slow
def test_bfloat16_and_eager(document: str) -> None:
    half = run_cli("run", document, *QUESTION, "-n", "4", "--json", "--dtype", "bfloat16").document
    full = run_cli("run", document, *QUESTION, "-n", "4", "--json").document
    assert half["memory"]["cache_bytes"] * 2 == full["memory"]["cache_bytes"]
    eager = run_cli("run", document, *QUESTION, "-n", "4", "--json", "--attention", "eager").document
    assert eager["result"]["text"] == full["result"]["text"]
    assert eager["plan"]["attention"] == "eager"


def test_interrupted_answer_is_still_a_document(document: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import tidekv_cli.engine.session as session

    whole = session.generate_tokens

    def three_then_interrupt(*arguments: Any) -> Iterator[int]:
        for count, token in enumerate(whole(*arguments)):
            if count == 3:
                raise KeyboardInterrupt
            yield token

    monkeypatch.setattr(session, "generate_tokens", three_then_interrupt)
    result = run_cli("run", document, *QUESTION, "-n", "12", "--json")
    assert result.code == 130
    assert result.document["result"]["finish_reason"] == "interrupted"
    assert result.document["result"]["tokens"] == 3
    streamed = run_cli("run", document, *QUESTION, "-n", "12")
    assert streamed.code == 130 and streamed.out.endswith("\n") and "Traceback" not in streamed.err
    assert "error: interrupted" in streamed.err and "hint: " in streamed.err
    at_once = run_cli("run", document, *QUESTION, "-n", "12", "--no-stream")
    assert at_once.code == 130 and at_once.out == streamed.out


def test_interrupted_prefill_is_still_a_document(document: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tidekv_cli.engine.session.Session.prefill", interrupt)
    result = run_cli("run", document, "--json", "-n", "4")
    assert result.code == 130
    assert result.document["result"] == {"text": "", "tokens": 0, "finish_reason": "interrupted"}


def test_closed_pipe_is_quiet(document: str) -> None:
    class Closed(io.BytesIO):
        def write(self, data: Any) -> int:
            raise BrokenPipeError

    err = io.StringIO()
    environment = Environment(io.BytesIO(), Closed(), err, os.environ)
    assert main(["run", document, "-n", "4"], environment) == 141
    assert "Traceback" not in err.getvalue() and "error:" not in err.getvalue()


def test_a_full_disk_is_named(document: str) -> None:
    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    for flags in ([], ["--json"], ["--dry-run", "--json"]):
        err = io.StringIO()
        assert main(["run", document, "-n", "2", *flags], Environment(io.BytesIO(), Full(), err, os.environ)) == 2
        assert "error: standard output cannot be written: No space left" in err.getvalue()
        assert "Traceback" not in err.getvalue()


@pytest.mark.slow
def test_full_devices(document: str) -> None:
    for redirected, code in (("> /dev/full 2> err.txt", 2), ("2> /dev/full > out.txt", 0)):
        command = f"{sys.executable} -m tidekv_cli run {document} -n 2 {redirected}"
        done = subprocess.run(["bash", "-c", command], cwd=Path(document).parent)
        assert done.returncode == code
    assert "Traceback" not in (Path(document).parent / "err.txt").read_text(encoding="utf-8")
    assert (Path(document).parent / "out.txt").read_text(encoding="utf-8").strip()


def test_a_kept_file_that_cannot_be_written_after_all_costs_no_answer(
    document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    whole = run_cli("run", document, *QUESTION, "-n", "4", "-q")
    monkeypatch.setattr("numpy.savez", full)
    result = run_cli("run", document, *QUESTION, "-n", "4", "--json", "--kept", str(tmp_path / "kept.npz"))
    assert result.code == 2 and "No space left" in result.err
    assert result.document["result"]["text"] + "\n" == whole.out and "--kept" in result.document["warnings"][0]
    assert [path.name for path in tmp_path.iterdir()] == ["harbour.txt"]


@pytest.mark.slow
def test_real_pipes(document: str) -> None:
    command = f"{sys.executable} -m tidekv_cli run {document} -n 40 2>err.txt | head -c 20; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=Path(document).parent)
    assert done.stdout.endswith("141\n")
    assert "Traceback" not in (Path(document).parent / "err.txt").read_text(encoding="utf-8")
    piped = (
        f"cat {document} | {sys.executable} -m tidekv_cli run -p 'Why?' -n 4 --json -q | {sys.executable} -m json.tool"
    )
    done = subprocess.run(["bash", "-c", piped], capture_output=True, text=True)
    assert done.returncode == 0 and '"schema": 1' in done.stdout


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("flags", [(), ("-q",)])
def test_progress_of_tokenization_is_for_terminals(document: str, flags: tuple[str, ...]) -> None:
    out, err = io.BytesIO(), Terminal()
    environment = Environment(io.BytesIO(), out, err, dict(os.environ))
    assert main(["run", document, *QUESTION, "-n", "2", "--dry-run", "--json", *flags], environment) == 0
    assert ("tokenize" in err.getvalue()) == (not flags)
    assert out.getvalue().startswith(b"{")
    assert "tokenize" not in run_cli("run", document, *QUESTION, "--dry-run").err


def test_an_interrupt_during_tokenization(document: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tidekv_cli.tokenization._Backend.call", interrupt)
    run_cli("run", document).assert_error(130, "interrupted")


def test_a_template_variable_that_is_not_there(document: str) -> None:
    result = run_cli("run", document, "--dry-run", "--template-arg", "enable_thinking=false")
    assert result.code == 0 and "enable_thinking changes nothing" in result.err
    raw = run_cli("run", document, "--dry-run", "--raw", "--template-arg", "a=1", "--json")
    assert any("--template-arg a changes nothing" in warning for warning in raw.document["warnings"])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("false", False), ("False", False), ("True", True), ("None", None), ("null", None)),
        *(("3", 3), ("0.5", 0.5), ("[1]", [1]), ("text", "text"), ('"3"', "3"), ("", "")),
    ],
)
def test_values_of_template_variables(text: str, value: object) -> None:
    from tidekv_cli.commands.run import _literal

    found = _literal(text)
    assert found == value and type(found) is type(value)
