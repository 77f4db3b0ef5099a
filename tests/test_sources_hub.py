"""Hub ids: the hub's own cache first, the network only for what is not there, and no weights before they are wanted."""

from __future__ import annotations

import errno
import json
import socket
import time
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from tests.cli_runner import run_cli
from tests.hub_server import COMMIT, Repository, Serve, point_at, repository_of
from tests.hub_server import HUB_ID as ID
from tidekv_cli.errors import ModelError
from tidekv_cli.hub import HubId, parse_hub_id
from tidekv_cli.sources import resolve_model


@pytest.fixture
def document(tmp_path: Path) -> str:
    path = tmp_path / "tides.txt"
    path.write_text("The tide turns twice a day, and the harbour with it.\n", encoding="utf-8")
    return str(path)


# Ids


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", HubId("org/name")),
        ("org/na.me-2_b@main", HubId("org/na.me-2_b", "main")),
        (f"org/name@{COMMIT}", HubId("org/name", COMMIT)),
        ("org/name@refs/pr/1", HubId("org/name", "refs/pr/1")),
        ("org/name@v1.0-rc", HubId("org/name", "v1.0-rc")),
        ("org/name@", None),
        ("org/name@a/../b", None),
        ("org/name@../b", None),
        ("org/name@a@b", None),
        ("org/name@a b", None),
        ("org/name@/a", None),
        ("name@main", None),
        ("a/b/c", None),
        ("örg/name", None),
    ],
)
def test_hub_ids(text: str, expected: HubId | None) -> None:
    assert parse_hub_id(text) == expected
    assert expected is None or str(expected) == text


# What is fetched, and when


def test_each_step_fetches_its_own(serve: Serve, sharded_model: Path, hub_cache: Path) -> None:
    hub = serve(repository_of(sharded_model, consolidated__safetensors=b"twice", pytorch_model__bin=b"pickle"))
    shards = sorted(path.name for path in sharded_model.glob("*.safetensors"))
    assert len(shards) > 2
    notes: list[str] = []
    source = resolve_model(ID, {}, False, notes.append)
    assert hub.fetched == ["config.json"] and source.path.parent.parent.parent == hub_cache
    hub.asked.clear()
    source.fetch_tokenizer()
    small = {path.name for path in sharded_model.glob("*.json")} - {"config.json"}
    assert sorted(hub.fetched) == sorted(small)
    hub.asked.clear()
    source.fetch_weights()
    assert hub.fetched == shards
    assert len(notes) == 3 and all(ID in note for note in notes) and "0.5 MiB" in notes[2]
    assert all((source.path / path.name).read_bytes() == path.read_bytes() for path in sharded_model.iterdir())


def test_what_is_there_is_not_asked_for_again(serve: Serve, sharded_model: Path) -> None:
    hub = serve(repository_of(sharded_model))
    source = resolve_model(ID, {}, False)
    source.fetch_tokenizer()
    source.fetch_weights()
    hub.asked.clear()
    for offline in (False, True):
        for name in (ID, f"{ID}@{COMMIT}", f"{ID}@main"):
            again = resolve_model(name, {}, offline)
            assert again.path == source.path and again.name == name
            again.fetch_tokenizer()
            again.fetch_weights()
    assert hub.asked == []


@pytest.mark.parametrize("lost", ["tokenizer.json", "model-2", "index"])
def test_what_was_interrupted_is_completed(serve: Serve, sharded_model: Path, lost: str) -> None:
    hub = serve(repository_of(sharded_model))
    shards = sorted(path.name for path in sharded_model.glob("*.safetensors"))
    name = {"model-2": shards[1], "index": "model.safetensors.index.json"}.get(lost, lost)
    source = resolve_model(ID, {}, False)
    source.fetch_tokenizer()
    source.fetch_weights()
    (source.path / name).unlink()
    hub.asked.clear()
    offline = resolve_model(ID, {}, True)
    with pytest.raises(ModelError, match="--offline") as caught:
        offline.fetch_tokenizer()
        offline.fetch_weights()
    assert ID in caught.value.message and hub.asked == []
    again = resolve_model(ID, {}, False)
    again.fetch_tokenizer()
    again.fetch_weights()
    assert (source.path / name).read_bytes() == (sharded_model / name).read_bytes()
    assert not set(shards) - {name} & set(hub.fetched)


@pytest.mark.parametrize("number", [0, 2])
def test_a_shard_that_the_hub_lacks(serve: Serve, sharded_model: Path, number: int) -> None:
    shard = sorted(path.name for path in sharded_model.glob("*.safetensors"))[number]
    serve(Repository({name: content for name, content in repository_of(sharded_model).files.items() if name != shard}))
    source = resolve_model(ID, {}, False)
    source.fetch_tokenizer()
    with pytest.raises(ModelError, match=f"{ID} has no {shard} on the hub") as caught:
        source.fetch_weights()
    assert "config.json" not in str(caught.value) and "not complete" in caught.value.hint


def test_the_command_runs_it(serve: Serve, sharded_model: Path, document: str) -> None:
    hub = serve(repository_of(sharded_model))
    flags = ("-m", ID, "-n", "4", "--budget", "40", "--json")
    planned = run_cli("run", document, *flags, "--dry-run")
    assert planned.code == 0 and not any(name.endswith(".safetensors") for name in hub.fetched), planned.err
    result = run_cli("run", document, *flags)
    assert result.code == 0 and result.document["result"]["tokens"] > 0, result.err
    hub.asked.clear()
    assert run_cli("run", document, *flags, "--offline").code == 0 and hub.asked == []


def test_what_does_not_fit_costs_no_weights(serve: Serve, sharded_model: Path, document: str) -> None:
    hub = serve(repository_of(sharded_model))
    run_cli("run", document, "-m", ID, "--memory-limit", "1MiB").assert_error(4)
    assert "tokenizer.json" in hub.fetched and not any(name.endswith(".safetensors") for name in hub.fetched)


@pytest.mark.parametrize("command", ["run", "probe-capacity"])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}, "DeepseekV3ForCausalLM"),
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "recurrent"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "awq"),
    ],
)
def test_what_is_refused_costs_its_config(
    serve: Serve, sharded_model: Path, document: str, command: str, changes: dict[str, Any], words: str
) -> None:
    config = {**json.loads((sharded_model / "config.json").read_text(encoding="utf-8")), **changes}
    hub = serve(repository_of(sharded_model, config__json=json.dumps(config).encode()))
    began = time.perf_counter()
    arguments = (document,) if command == "run" else ()
    run_cli(command, *arguments, "-m", ID).assert_error(3, ID, words)
    assert time.perf_counter() - began < 10
    assert hub.fetched == ["config.json"] and all(path.endswith("/config.json") for path in hub.asked)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pytorch_model.bin", "a pickle that can run code"),
        ("model-q4.gguf", "give its path"),
        ("consolidated.safetensors", "neither model.safetensors nor"),
        ("flax_model.msgpack", "no weights"),
    ],
)
def test_other_weights_are_refused_before_they_are_fetched(
    serve: Serve, sharded_model: Path, document: str, name: str, words: str
) -> None:
    files = {path.name: path.read_bytes() for path in sharded_model.glob("*.json") if "index" not in path.name}
    hub = serve(Repository({**files, name: b"large"}))
    run_cli("run", document, "-m", ID).assert_error(3, ID, words)
    assert hub.fetched == ["config.json"]


# Revisions


def test_a_revision_is_the_one_that_is_asked(serve: Serve, sharded_model: Path) -> None:
    hub = serve(Repository(repository_of(sharded_model).files, revisions=("refs/pr/7", COMMIT)))
    source = resolve_model(f"{ID}@refs/pr/7", {}, False)
    source.fetch_weights()
    assert source.path.name == COMMIT and any("refs%2Fpr%2F7" in path for path in hub.asked)
    assert resolve_model(f"{ID}@refs/pr/7", {}, True).path == source.path
    with pytest.raises(ModelError, match="--offline"):
        resolve_model(f"{ID}@main", {}, True)
    with pytest.raises(ModelError, match=r"no revision 'v9\.9'") as caught:
        resolve_model(f"{ID}@v9.9", {}, False)
    assert ID in caught.value.message and f"{ID}/tree/main" in caught.value.hint


# What goes wrong


MESSAGES = {
    "gated, not logged in": ((401, {"X-Error-Code": "GatedRepo"}), "is gated, and you are not logged in", "auth login"),
    "gated, logged in": ((403, {"X-Error-Code": "GatedRepo"}), "your account has no access", "ask for it at"),
    "private or missing": ((401, {"X-Error-Code": "RepoNotFound"}), "private, or does not exist", "auth login"),
    "missing, logged in": ((404, {"X-Error-Code": "RepoNotFound"}), "the hub has no model", "spelling"),
    "disabled": ((403, {"X-Error-Message": "Access to this resource is disabled."}), "is disabled", "another model"),
    "bad token": ((401, {"X-Error-Message": "Invalid credentials in Authorization header"}), "valid login", "HF_TOKEN"),
    "forbidden": ((403, {}), "forbids", "token"),
    "limited": ((429, {}), "429", "later"),
    "down": ((503, {}), "503", "later"),
    "no config": ((404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}), "no config.json", ".gguf"),
}


@pytest.mark.parametrize("case", MESSAGES)
def test_what_the_hub_says(serve: Serve, case: str) -> None:
    answer, message, hint = MESSAGES[case]
    serve(Repository(answer=answer))
    with pytest.raises(ModelError) as caught:
        resolve_model(ID, {}, False)
    assert ID in caught.value.message and message in caught.value.message and hint in caught.value.hint
    others = {said for other, (_, said, _) in MESSAGES.items() if other != case}
    assert not any(said in caught.value.message for said in others)


def test_access_that_is_lost_before_the_weights(serve: Serve, sharded_model: Path) -> None:
    hub = serve(repository_of(sharded_model))
    source = resolve_model(ID, {}, False)
    hub.repositories = {ID: Repository(answer=(403, {"X-Error-Code": "GatedRepo"}))}
    for fetch in (source.fetch_tokenizer, source.fetch_weights):
        with pytest.raises(ModelError, match="no access"):
            fetch()


def test_an_unreachable_hub(
    monkeypatch: pytest.MonkeyPatch,
    hub_cache: Path,
    document: str,
    capfd: pytest.CaptureFixture[str],
    waited: list[float],
) -> None:
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        point_at(monkeypatch, hub_cache, f"http://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(ModelError, match=r"the hub cannot be reached: .*refused") as caught:
            resolve_model(ID, {}, False)
        run_cli("run", document, "-m", ID).assert_error(3, "the hub cannot be reached")
    assert ID in caught.value.message and "network" in caught.value.hint and waited == []
    assert capfd.readouterr() == ("", "")  # nothing but what the command wrote to its own streams


@pytest.mark.parametrize("chosen", [False, True])
def test_a_hub_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, hub_cache: Path, chosen: bool) -> None:
    if chosen:
        monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "0.2")
        monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.2)
    else:
        monkeypatch.delenv("HF_HUB_ETAG_TIMEOUT", raising=False)
        monkeypatch.setattr("tidekv_cli.hub._ANSWER_S", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        point_at(monkeypatch, hub_cache, f"http://127.0.0.1:{silent.getsockname()[1]}")
        began = time.perf_counter()
        with pytest.raises(ModelError, match=r"the hub cannot be reached: .*timed out"):
            resolve_model(ID, {}, False)
    assert time.perf_counter() - began < 5


def test_an_absent_model_offline(monkeypatch: pytest.MonkeyPatch, serve: Serve, sharded_model: Path) -> None:
    hub = serve(repository_of(sharded_model))
    with pytest.raises(ModelError, match=f"{ID}@v1 is not on disk and --offline"):
        resolve_model(f"{ID}@v1", {}, True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE forbids"):
        resolve_model(ID, {}, False)
    assert hub.asked == []


@pytest.mark.parametrize(
    ("error", "word", "hint"),
    [
        (ConnectionError("reset by peer"), "reset by peer", "network"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left", "disk space"),
        (PermissionError(errno.EACCES, "Permission denied"), "Permission denied", "permissions"),
        (ValueError("bad repo id"), "bad repo id", "try again"),
    ],
)
def test_other_failures(monkeypatch: pytest.MonkeyPatch, error: BaseException, word: str, hint: str) -> None:
    def fail(*arguments: object, **named: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(ModelError, match=word) as caught:
        resolve_model(ID, {}, offline=False)
    assert ID in caught.value.message and hint in caught.value.hint


def test_an_interrupt_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: object, **named: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", interrupt)
    with pytest.raises(KeyboardInterrupt):
        resolve_model(ID, {}, offline=False)
