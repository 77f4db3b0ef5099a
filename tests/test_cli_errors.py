"""Bad input at the command line: the right exit code, one error and one hint line, before any weight is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli_runner import run_cli


@pytest.fixture
def document(tmp_path: Path) -> str:
    path = tmp_path / "tides.txt"
    path.write_text("The tide turns twice a day, and the harbour with it.\n", encoding="utf-8")
    return str(path)


@pytest.fixture(autouse=True)
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of these cases may get as far as loading."""

    def refuse(*_: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("tidekv_cli.loading.load_model", refuse)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.txt", b"", ["empty.txt", "is empty"]),
        ("blank.txt", b" \n\t\n", ["blank.txt", "white space"]),
        ("latin.txt", b"caf\xe9 au lait", ["latin.txt", "utf-8", "byte 3", "--encoding"]),
        ("cut.txt", "né".encode()[:2], ["byte 1"]),
        ("bom.txt", b"\xef\xbb\xbf", ["is empty"]),
        ("bom-latin.txt", b"\xef\xbb\xbfa\xff", ["byte 4"]),
    ],
)
def test_documents_that_cannot_be_used(tmp_path: Path, name: str, content: bytes, words: list[str]) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    run_cli("run", str(path)).assert_error(6, *words)


def test_kept_never_overwrites_what_is_read(document: str, tmp_path: Path, embedded_path: Path) -> None:
    before = Path(document).read_bytes()
    link = tmp_path / "link.npz"
    link.symlink_to(document)
    for name in (document, str(link)):
        run_cli("run", document, "--kept", name).assert_error(2, "overwrite")
    assert Path(document).read_bytes() == before
    model = tmp_path / "model.gguf"
    model.symlink_to(embedded_path)
    run_cli("run", document, "-m", str(model), "--kept", str(model)).assert_error(2, "overwrite")


def test_a_document_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidekv_cli.documents._LONGEST", 1 << 20)
    run_cli("run", "/dev/zero").assert_error(6, "/dev/zero", "longer")
    run_cli("run", stdin=b"x" * (1 << 21)).assert_error(6, "stdin", "longer")


def test_json_is_asked_for_by_the_flag_alone(document: str) -> None:
    assert run_cli("run", "--json", "nowhere.txt").document["error"]["code"] == 6
    assert run_cli("run", "nowhere.txt", "-p", "--json").out == ""
    assert run_cli("run", "--", "--json").out == ""


def test_memory_that_runs_out_before_the_model_is_loaded(document: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("tidekv_cli.runner.read_documents", exhausted)
    run_cli("run", document).assert_error(7, "memory ran out")


def test_a_profile_of_another_kind_of_device(document: str) -> None:
    run_cli("run", document, "--profile", "l4").assert_error(8, "profile l4 is for devices of kind cuda")


def test_half_a_surrogate_pair_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "half.txt").write_text("a \\ud800 b")
    run_cli("run", str(tmp_path / "half.txt"), "--encoding", "unicode_escape").assert_error(6, "half.txt")


def test_missing_file_directory_and_odd_names(tmp_path: Path) -> None:
    run_cli("run", str(tmp_path / "no.txt")).assert_error(6, "no.txt")
    run_cli("run", str(tmp_path)).assert_error(6, "directory")
    run_cli("run", "a\0b").assert_error(6)
    run_cli("run", "").assert_error(6)


def test_stdin_closed_empty_and_terminal() -> None:
    run_cli("run", stdin=None).assert_error(6, "stdin is closed")
    run_cli("run", stdin=b"").assert_error(6, "stdin is empty")
    run_cli("run", "-", "-", stdin=b"text").assert_error(2, "twice")
    run_cli("run", terminal=True).assert_error(2, "terminal")


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--budget", "3"], 2, ["--budget 3", "32", "window"]),
        (["--budget", "0"], 2, ["--budget 0"]),
        (["--budget", "-5"], 2, ["-5"]),
        (["--budget", "much"], 2, ["much", "full"]),
        (["--selector", "streaming", "--budget", "4"], 2, ["5 tokens"]),
        (["--selector", "all", "--budget", "64"], 2, ["selector all"]),
        (["--chunk-size", "0"], 2, ["--chunk-size 0"]),
        (["--chunk-size", "-1"], 2, ["--chunk-size -1"]),
        (["--chunk-size", "x"], 2, ["--chunk-size"]),
        (["--score-block", "0"], 2, ["--score-block 0"]),
        (["-n", "0"], 2, ["--max-new-tokens 0"]),
        (["--temperature", "-1"], 2, ["--temperature"]),
        (["--temperature", "nan"], 2, ["--temperature"]),
        (["--temperature", "inf"], 2, ["--temperature"]),
        (["--top-p", "0"], 2, ["--top-p"]),
        (["--top-p", "1.5"], 2, ["--top-p"]),
        (["--seed", str(1 << 70)], 2, ["--seed"]),
        (["--set", "window"], 2, ["KEY=VALUE"]),
        (["--set", "window=0"], 2, ["window=0"]),
        (["--set", "window=two"], 2, ["window=two"]),
        (["--set", "pool=sum"], 2, ["pool=sum"]),
        (["--set", "pool_kernel=4"], 2, ["pool_kernel=4"]),
        (["--set", "pool_kernel=99999999999999999999999"], 2, ["pool_kernel", "1023"]),
        (["--set", "window=" + "9" * 5000], 2, ["window"]),
        (["--chunk-size", "9" * 5000], 2, ["--chunk-size"]),
        (["--method", ""], 2, ["no method"]),
        (["--selector", ""], 2, ["--selector"]),
        (["--device", ""], 2, ["--device"]),
        (["--profile", ""], 2, ["no profile"]),
        (["--profile", "~nosuchuser/p.yaml"], 2, ["~nosuchuser/p.yaml"]),
        (["--memory-limit", ""], 2, ["--memory-limit"]),
        (["--kept", ""], 2, ["--kept"]),
        (["--kept", "/dev/null"], 2, ["no file"]),
        (["--template-arg", "a"], 2, ["--template-arg"]),
        (["--template-arg", "tokenize=true"], 2, ["tokenize"]),
        (["--template-arg", "tools=1"], 2, ["tools"]),
        (["--encoding", "\udcff"], 2, ["--encoding"]),
        (["--errors", "\udcff"], 2, ["--errors"]),
        (["--kept", "x" * 5000], 2, ["--kept"]),
        (["-m", ""], 3, ["no model called ''"]),
        (["--set", "sinks=-1"], 2, ["sinks=-1"]),
        (["--set", "gamma=1"], 2, ["gamma", "pool_kernel"]),
        (["--method", "magic"], 2, ["magic", "tidekv-snapkv"]),
        (["--schedule", "never"], 2, ["never"]),
        (["--budget-policy", "ziggurat"], 2, ["ziggurat", "pyramid"]),
        (["--budget-policy", "ada"], 2, ["store dense", "--kv-store flat"]),
        (["--schedule", "chunked"], 2, ["evicts nothing", "--selector all"]),
        (["--set", "beta=3"], 2, ["no parameter 'beta'", "pool_kernel"]),
        (["--kv-store", "paged"], 2, ["paged"]),
        (["--attention", "magic"], 2, ["magic"]),
        (["--attention", "flash-attn"], 2, ["flash-attn"]),
        (["--dtype", "int8"], 2, ["int8"]),
        (["--dtype", "float16"], 2, ["float16"]),
        (["--truncate", "sides"], 2, ["sides"]),
        (["--encoding", "klingon"], 2, ["klingon"]),
        (["--encoding", "base64"], 2, ["base64"]),
        (["--errors", "shrug"], 2, ["shrug"]),
        (["--errors", "surrogateescape"], 2, ["surrogateescape", "replace"]),
        (["--errors", "xmlcharrefreplace"], 2, ["xmlcharrefreplace"]),
        (["--encoding", "undefined"], 2, ["undefined"]),
        (["-p", "caf\udce9"], 2, ["--prompt", "UTF-8"]),
        (["--stop", ""], 2, ["--stop"]),
        (["--memory-limit", "lots"], 2, ["lots"]),
        (["--profile", "toaster"], 2, ["toaster", "cpu"]),
        (["--device", "cuda"], 8, ["cuda"]),
        (["--device", "cuda:7"], 8, ["cuda:7"]),
        (["--device", "abacus"], 2, ["abacus"]),
        (["--no-such-flag"], 2, ["--no-such-flag"]),
        (["-m", "no-such-model"], 3, ["no-such-model", "smollm2-135m"]),
        (["-m", "nowhere/model.gguf"], 3, ["model.gguf"]),
        (["-m", "nobody/nothing", "--offline"], 3, ["--offline"]),
        (["--memory-limit", "600MiB"], 4, ["600.0 MiB", "--dtype bfloat16"]),
        (["--memory-limit", "600MiB", "--truncate", "middle"], 4, ["600.0 MiB", "no prompt fits"]),
        (["--memory-limit", "1GiB", "--truncate", "tail", "--dry-run"], 4, ["--dtype bfloat16", "weights"]),
        (["--memory-limit", "6MiB", "--dtype", "bfloat16"], 4, ["weights and reserve alone take"]),
        (["--memory-limit", "6"], 2, ["6 bytes", "6GiB"]),
        (["-n", "9000"], 5, ["8192", "--max-new-tokens"]),
        (["-n", "9000", "--truncate", "tail"], 5, ["besides its documents"]),
        (["--kept", "/nonexistent/place/kept.npz"], 2, ["--kept"]),
    ],
)
def test_bad_flags(document: str, flags: list[str], code: int, words: list[str], embedded_path: Path) -> None:
    run_cli("run", document, *flags).assert_error(code, *words)


def test_document_longer_than_the_window(tmp_path: Path, embedded_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text("tide " * 9000, encoding="utf-8")
    result = run_cli("run", str(path))
    result.assert_error(5, "8192", "--truncate")


def test_errors_as_json(document: str) -> None:
    result = run_cli("run", document, "--budget", "3", "--json")
    assert result.code == 2
    error = result.document["error"]
    assert result.document["schema"] == 1
    assert (error["code"], error["kind"]) == (2, "usage")
    assert "--budget 3" in error["message"] and error["hint"]
    assert json.loads(run_cli("run", document, "--nope", "--json").out)["error"]["code"] == 2


def test_corrupt_embedded_model_is_named(document: str, tmp_path: Path, embedded_path: Path) -> None:
    place = tmp_path / "models" / "smollm2-135m"
    place.mkdir(parents=True)
    damaged = place / embedded_path.name
    damaged.write_bytes(embedded_path.read_bytes()[:-1000])
    result = run_cli("run", document, environ={"TIDEKV_CACHE_DIR": str(tmp_path)})
    result.assert_error(3, str(damaged)[:40], "models pull")


def test_unwritable_cache(document: str, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way", encoding="utf-8")
    result = run_cli("run", document, environ={"TIDEKV_CACHE_DIR": str(blocked)})
    result.assert_error(3, "TIDEKV_CACHE_DIR")


def test_bad_config_file(document: str, tmp_path: Path) -> None:
    (tmp_path / "tidekv").mkdir()
    config = tmp_path / "tidekv" / "config.yaml"
    for text, word in (
        ("colour: red\n", "colour"),
        ("budget: [1]\n", "budget"),
        ("a: b: c\n", "config.yaml"),
        ("- 1\n", "mapping"),
    ):
        config.write_text(text, encoding="utf-8")
        run_cli("run", document, environ={"XDG_CONFIG_HOME": str(tmp_path)}).assert_error(2, word)


def test_a_bug_is_one_line(document: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("split by nought")

    monkeypatch.setattr("tidekv_cli.runner.read_documents", broken)
    run_cli("run", document).assert_error(1, "ZeroDivisionError", "TIDEKV_TRACEBACK")
    shown = run_cli("run", document, environ={"TIDEKV_TRACEBACK": "1"})
    assert "Traceback" in shown.err


def test_unknown_command_and_no_arguments() -> None:
    run_cli("swim").assert_error(2, "swim")
    assert run_cli().code == 2
