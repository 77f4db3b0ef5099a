"""Hub ids: the hub's own cache first, the network only for what is not there."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from tidekv_cli.errors import ModelError
from tidekv_cli.sources import resolve_model


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test here may reach the hub."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def test_an_absent_hub_model_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="--offline") as caught:
        resolve_model("some-org/some-model", {}, offline=True)
    assert "some-org/some-model" in caught.value.message


def test_a_cached_hub_model_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--some-org--some-model"
    (repository / "snapshots" / commit).mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (repository / "snapshots" / commit / name).write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    for offline in (False, True):
        source = resolve_model("some-org/some-model", {}, offline)
        assert source.path == repository / "snapshots" / commit


def answering(first: Any, second: Any) -> tuple[Callable[..., str], list[dict[str, Any]]]:
    """A `snapshot_download` that gives or raises `first` without and `second` with the network."""
    calls: list[dict[str, Any]] = []

    def snapshot_download(name: str, **named: Any) -> str:
        calls.append(named)
        answer = first if named.get("local_files_only") else second
        if isinstance(answer, BaseException):
            raise answer
        return answer

    return snapshot_download, calls


def bare(kind: type[BaseException]) -> BaseException:
    return kind.__new__(kind)  # the hub's errors want a response, which nothing here reads


def test_an_absent_hub_model_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    download, calls = answering(errors.LocalEntryNotFoundError("absent"), str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    notes: list[str] = []
    assert resolve_model("some-org/some-model", {}, False, notes.append).path == tmp_path
    assert len(calls) == 2 and "some-org/some-model" in notes[0]
    for call in calls:
        assert "*.safetensors" in call["allow_patterns"]
        assert not {"*.bin", "*.pt", "*.py"} & set(call["allow_patterns"])


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (bare(errors.GatedRepoError), "gated"),
        (bare(errors.RepositoryNotFoundError), "the hub has no model"),
        (errors.LocalEntryNotFoundError("no network"), "cannot be reached"),
        (ConnectionError("reset by peer"), "reset by peer"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left"),
        (ValueError("bad repo id"), "bad repo id"),
    ],
)
def test_the_hub_fails(monkeypatch: pytest.MonkeyPatch, error: BaseException, word: str) -> None:
    download, _ = answering(errors.LocalEntryNotFoundError("absent"), error)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelError, match=word) as caught:
        resolve_model("some-org/some-model", {}, offline=False)
    assert "some-org/some-model" in caught.value.message and caught.value.hint


def test_an_interrupt_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    download, _ = answering(KeyboardInterrupt(), "")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(KeyboardInterrupt):
        resolve_model("some-org/some-model", {}, offline=False)


@pytest.mark.parametrize("lost", ["config.json", "tokenizer.json", "model.safetensors", "model-2.safetensors", "index"])
def test_a_snapshot_that_was_interrupted_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    sharded = lost in ("model-2.safetensors", "index")
    shards = ["model-1.safetensors", "model-2.safetensors"] if sharded else ["model.safetensors"]
    for name in ("config.json", "tokenizer.json", *shards):
        if name != lost:
            (tmp_path / name).write_text("{}")
    if sharded:
        index = {"weight_map": {"a": shards[0], "b": shards[1]}}
        content = "{" if lost == "index" else json.dumps(index)
        (tmp_path / "model.safetensors.index.json").write_text(content)
    download, calls = answering(str(tmp_path), str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    resolve_model("some-org/some-model", {}, offline=False)
    assert len(calls) == 2
    resolve_model("some-org/some-model", {}, offline=True)
    assert len(calls) == 3  # offline, what is there is taken, and loading names what is missing
