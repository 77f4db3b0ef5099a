"""`tidekv probe-capacity`: what fits where, without weights, network or the device itself."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.cli_runner import CliResult, run_cli

GIB = 1 << 30


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A cache of this file's own."""
    return {"TIDEKV_CACHE_DIR": str(tmp_path_factory.mktemp("cache"))}


def probe(plans: dict[str, str], *arguments: str) -> CliResult:
    return run_cli("probe-capacity", "--offline", *arguments, environ=plans)


def test_llama_8b_on_an_rtx_4090(plans: dict[str, str]) -> None:
    result = probe(plans, "-m", "llama-3.1-8b", "--profile", "rtx-4090", "--json")
    found = result.document
    assert result.code == 0
    assert found["max_context_tokens"] == 131072 and found["limited_by"] == "window"
    assert found["memory_context_tokens"] > 131072
    assert found["device"]["kind"] == "cuda" and found["device"]["profile"] == "rtx-4090"
    assert found["plan"]["bytes"]["weights"] == 2 * 8_030_261_248
    assert found["plan"]["estimate"]["ttft_s"] > 0
    contexts = [row["context_tokens"] for row in found["rows"]]
    assert contexts == sorted(contexts) and contexts[-1] == 131072
    for row in found["rows"]:
        assert row["fits"] and row["within_window"] and row["measured_peak_bytes"] is None
        assert row["peak_bytes"] == sum(row["bytes"].values())
        assert row["headroom_bytes"] == found["device"]["free_bytes"] - row["peak_bytes"]


def test_weights_that_do_not_fit(plans: dict[str, str]) -> None:
    result = probe(plans, "-m", "llama-3.1-8b", "--profile", "jetson-orin-nx-16gb")
    result.assert_error(4, "exceeds", "weights and reserve alone take", "use a smaller model")
    assert result.out == ""
    document = probe(plans, "-m", "llama-3.1-8b", "--profile", "jetson-orin-nx-16gb", "--json").document
    assert document["error"]["code"] == 4 and document["error"]["kind"] == "does_not_fit"


def test_lengths_that_were_asked_for(plans: dict[str, str]) -> None:
    arguments = ("-m", "llama-3.1-8b", "--profile", "rtx-4090", "--context", "40000, 200000,90000000")
    rows = probe(plans, *arguments, "--json").document["rows"]
    assert [row["context_tokens"] for row in rows] == [40000, 200000, 90000000]
    assert [row["fits"] for row in rows] == [True, True, False]
    assert [row["within_window"] for row in rows] == [True, False, False]
    text = probe(plans, *arguments)
    assert text.code == 0 and "90000000" in text.out and "no, beyond the window" in text.out


def test_what_is_simulated_agrees_with_the_lines(plans: dict[str, str]) -> None:
    arguments = ("-m", "llama-3.1-8b", "--profile", "rtx-4090", "--context", "50000", "--json")
    lines, exact = (probe(plans, *arguments, *more).document["rows"][0] for more in ((), ("--simulate",)))
    transient = exact["peak_bytes"] - exact["bytes"]["weights"]
    assert 0 <= lines["peak_bytes"] - exact["peak_bytes"] <= transient / 100


@pytest.mark.slow
def test_memory_decides_and_what_would_help_is_said(plans: dict[str, str]) -> None:
    limit = ("-m", "llama-3.1-8b", "--profile", "rtx-4090", "--memory-limit", "17.5GiB")
    result = probe(plans, *limit)
    assert result.code == 0, result.err
    assert "limited by memory" in result.out and "--chunk-size 256 to" in result.out and "--budget 256 to" in result.out
    most = probe(plans, *limit, "--json").document["max_context_tokens"]
    rows = probe(plans, *limit, "--context", f"{most},{most + 1}", "--json").document["rows"]
    assert [row["fits"] for row in rows] == [True, False]
    less = probe(plans, *limit[:-1], "17.2GiB", "--json").document
    assert 0 < less["max_context_tokens"] < most


def test_flags_to_paste(plans: dict[str, str]) -> None:
    result = probe(plans, "-m", "llama-3.1-8b", "--profile", "l4", "--set", "window=16", "--args")
    flags = shlex.split(result.out)
    assert flags[:2] == ["--model", "llama-3.1-8b"] and result.out.count("\n") == 1
    for pair in (["--chunk-size", "2048"], ["--budget", "4096"], ["--dtype", "bfloat16"], ["--set", "window=16"]):
        assert pair in [flags[index : index + 2] for index in range(len(flags))]
    again = probe(plans, *flags, "--profile", "l4", "--json").document
    first = probe(plans, "-m", "llama-3.1-8b", "--profile", "l4", "--set", "window=16", "--json").document
    assert again["max_context_tokens"] == first["max_context_tokens"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--context", "many"), 2, "is no list of lengths"),
        (("--context", ""), 2, "is no list of lengths"),
        (("--context", "10,,20"), 2, "is no list of lengths"),
        (("--context", "0"), 2, "--context 0 is impossible"),
        (("--context", "99999999999999999999"), 2, "is no list of lengths"),
        (("--profile", "abacus"), 2, "no profile"),
        (("-m", "nothing-like-it"), 3, "there is no model"),
        (("-m", "someone/unknown"), 3, "--offline forbids"),
        (("-m", "llama-3.1-8b", "--profile", "rtx-4090", "--verify"), 2, "is not here"),
        (("--device", "cuda:7"), 8, "cuda:7"),
        (("--memory-limit", "2MiB"), 4, "exceeds"),
        (("--budget", "3"), 2, "below the 32 tokens"),
        (("--method", "tidekv-full", "--budget", "7"), 2, "means nothing"),
        (("--profile", "generic-cuda"), 2, "does not say how much memory"),
        (("-n", "8192"), 5, "leave no room for a prompt in the model's window of 8192"),
        (("-n", "1000000000000000000"), 2, "from 1 to 1048576"),
        (("--score-block", "1000000000000"), 2, "from 1 to 1048576"),
        (("--budget", "999999999999999"), 2, "more than 1048576"),
        (("--simulate", "--context", "1000000000000"), 2, "too long to be simulated"),
        (("--attention", "eager", "--context", "1000000000000"), 2, "too long to be simulated"),
    ],
)
def test_errors(plans: dict[str, str], arguments: tuple[str, ...], code: int, words: str) -> None:
    given = arguments if "-m" in arguments else ("-m", "smollm2-135m", *arguments)
    probe(plans, *given).assert_error(code, words)


def test_one_form_of_output_at_a_time(plans: dict[str, str]) -> None:
    document = probe(plans, "-m", "smollm2-135m", "--args", "--json").document
    assert document["error"]["code"] == 2 and "exclude each other" in document["error"]["message"]


def test_a_profile_that_leaves_the_memory_open(plans: dict[str, str]) -> None:
    flags = ("-m", "llama-3.1-8b", "--profile", "generic-cuda", "--memory-limit", "24GiB", "--json")
    found = probe(plans, *flags).document
    assert found["model"] == "llama-3.1-8b" and found["device"]["kind"] == "cuda"
    assert found["plan"]["attention"] == "flash-attn" and found["max_context_tokens"] == 131072


def test_an_automatic_budget_stays_one(plans: dict[str, str]) -> None:
    flags = shlex.split(probe(plans, "-m", "smollm2-135m", "--budget", "auto", "--args").out)
    assert flags[flags.index("--budget") + 1] == "auto"


CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 4096,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"hidden_act": "nope"}, 3),
        ({"head_dim": 1}, 3),
        ({"head_dim": 7}, 3),
        ({"pad_token_id": 300}, 3),
        ({"rope_scaling": {"rope_type": "yarn"}}, 3),
        ({"hidden_size": 1 << 60}, 3),
        ({"vocab_size": 1 << 62}, 3),
        ({"intermediate_size": 1 << 62}, 3),
        ({"max_position_embeddings": 10**400}, 3),
        ({"max_position_embeddings": 1e30}, 0),
        ({"max_position_embeddings": None}, 0),
        ({"torch_dtype": "float5"}, 0),
        ({"return_dict": False}, 0),
        ({"_attn_implementation": "flash_attention_2"}, 0),
    ],
)
def test_odd_configs(plans: dict[str, str], tmp_path: Path, change: dict[str, Any], code: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **change}), encoding="utf-8")
    result = probe(plans, "-m", str(tmp_path), "--memory-limit", "2GiB", "--budget", "64", "--score-block", "64")
    if code:
        result.assert_error(code)
    else:
        assert result.code == 0, result.err


def test_weights_that_are_not_there_cannot_be_verified(plans: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    flags = ("-m", str(tmp_path), "--memory-limit", "600MiB", "--budget", "64", "--score-block", "64")
    probe(plans, *flags, "--verify").assert_error(3, str(tmp_path))


@pytest.mark.parametrize(
    "name",
    [
        "phi-3.5-mini",
        "qwen3-8b",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("llama-3.2-1b", "llama-3.2-3b", "mistral-7b-v0.2", "qwen2.5-7b", "smollm2-1.7b")
        ),
    ],
)
def test_every_alias_has_an_answer(plans: dict[str, str], name: str) -> None:
    found = probe(plans, "-m", name, "--profile", "h200", "--context", "60000", "--json").document
    assert found["rows"][0]["fits"] and found["max_context_tokens"] > 0


@pytest.mark.slow
def test_full_auto_and_other_methods(plans: dict[str, str]) -> None:
    base = ("-m", "llama-3.1-8b", "--profile", "rtx-4090", "--context", "60000", "--json")
    peaks = {
        name: probe(plans, *base, *more).document["rows"][0]["peak_bytes"]
        for name, more in {
            "snapkv": (),
            "full": ("--budget", "full"),
            "all": ("--method", "tidekv-full"),
            "auto": ("--budget", "auto"),
            "oneshot": ("--method", "snapkv"),
        }.items()
    }
    assert peaks["auto"] < peaks["snapkv"] < min(peaks["full"], peaks["oneshot"]) and peaks["all"] <= peaks["full"]


@pytest.mark.slow
def test_verify_really_runs_it(
    plans: dict[str, str], tiny_directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('this file is not ours')", encoding="utf-8")
    monkeypatch.chdir(tmp_path)  # what lies about there is not run
    arguments = ("-m", tiny_directory, "--memory-limit", "513.5MiB", "--chunk-size", "64", "-n", "4")
    result = probe(plans, *arguments, "--budget", "64", "--score-block", "64", "--verify", "--json")
    assert result.code == 0, result.err
    found = result.document
    most = found["max_context_tokens"]
    assert found["limited_by"] == "memory" and 100 < most < 4096
    rows = {row["context_tokens"]: row for row in found["rows"]}
    measured, above = rows[most], rows[most + 64]
    assert measured["fits"] and not above["fits"]
    assert above["measured_peak_bytes"] is None and "live tensors" in above["failure"]
    assert measured["process_peak_bytes"] > measured["measured_peak_bytes"] and measured["failure"] is None
    live = measured["bytes"]
    planned = measured["peak_bytes"] - live["reserve"]
    assert measured["measured_peak_bytes"] == pytest.approx(planned, rel=0.01)
    assert measured["measured_peak_bytes"] <= int(513.5 * (1 << 20)) - live["reserve"]


def test_a_quarter_more_is_refused(plans: dict[str, str], tiny_directory: str, tmp_path: Path) -> None:
    flags = ("--memory-limit", "513.5MiB", "--chunk-size", "64", "-n", "4", "--budget", "64", "--score-block", "64")
    most = probe(plans, "-m", tiny_directory, *flags, "--json").document["max_context_tokens"]
    document = tmp_path / "doc.txt"
    document.write_text("x" * (most * 5 // 4), encoding="utf-8")
    refused = run_cli("run", "-m", tiny_directory, "--raw", *flags, str(document), environ=plans)
    refused.assert_error(4, "exceeds", "tokens fits")
    document.write_text("x" * (most - 4), encoding="utf-8")
    fits = run_cli("run", "-m", tiny_directory, "--raw", *flags, str(document), "--json", environ=plans)
    assert fits.code == 0, fits.err
    assert json.loads(fits.out)["prompt"]["tokens"] == most - 4
