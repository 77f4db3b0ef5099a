"""Whether all of a repository's small files are there: by the hub's list of them, which is asked for once."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import pytest

from tests.hub_server import HUB_ID as ID
from tests.hub_server import Repository, Serve, point_at, repository_of
from tidekv_cli.errors import ModelError
from tidekv_cli.sources import ModelSource, resolve_model


def kept_listing(source: ModelSource) -> Path:
    assert source.snapshot is not None
    return source.snapshot.listing


def put_by_another(source: ModelSource, sharded_model: Path, *names: str) -> None:
    """Files beside the config, as another program leaves them that asks for what it wants alone."""
    for name in names:
        shutil.copy(sharded_model / name, source.path / name)


def with_slow_tokenizer(sharded_model: Path) -> Repository:
    return repository_of(
        sharded_model, vocab__json=b"{}", merges__txt=b"#version: 0.2\n", chat_template__jinja=b"{{ 1 }}"
    )


@pytest.mark.parametrize("lost", ["tokenizer.json", "generation_config.json", "chat_template.jinja", "merges.txt"])
def test_a_tokenizer_that_was_interrupted(serve: Serve, sharded_model: Path, lost: str) -> None:
    repository = with_slow_tokenizer(sharded_model)
    hub = serve(Repository({name: content for name, content in repository.files.items() if name != lost}))
    hub.unsent = {lost: len(repository.files[lost])}
    source = resolve_model(ID, {}, False)
    with pytest.raises(ModelError, match=f"{ID} has no {lost} on the hub"):
        source.fetch_tokenizer()
    with pytest.raises(ModelError, match="or not all of it"):
        resolve_model(ID, {}, True).fetch_tokenizer()
    hub.repositories, hub.unsent = {ID: repository}, {}
    again = resolve_model(ID, {}, False)
    again.fetch_tokenizer()
    assert (source.path / lost).read_bytes() == repository.files[lost]
    hub.asked.clear()
    resolve_model(ID, {}, False).fetch_tokenizer()
    resolve_model(ID, {}, True).fetch_tokenizer()
    assert hub.asked == []


@pytest.mark.parametrize("there", [("tokenizer.json",), ("vocab.json", "merges.txt")])
def test_what_another_program_chose_is_completed(serve: Serve, sharded_model: Path, there: tuple[str, ...]) -> None:
    repository = with_slow_tokenizer(sharded_model)
    hub = serve(repository)
    source = resolve_model(ID, {}, False)
    for name in there:
        (source.path / name).write_bytes(repository.files[name])
    hub.asked.clear()
    resolve_model(ID, {}, True).fetch_tokenizer()
    assert hub.asked == [] and not kept_listing(source).exists()
    source.fetch_tokenizer()
    assert {"generation_config.json", "tokenizer.json", "chat_template.jinja", "merges.txt"} <= {
        path.name for path in source.path.iterdir()
    }
    assert not {*there} & {*hub.fetched}


def test_a_whole_directory_of_another_program_costs_one_list(serve: Serve, sharded_model: Path) -> None:
    hub = serve(repository_of(sharded_model))
    source = resolve_model(ID, {}, False)
    put_by_another(
        source, sharded_model, *(path.name for path in sharded_model.iterdir() if path.name != "config.json")
    )
    hub.asked.clear()
    for _ in range(2):
        again = resolve_model(ID, {}, False)
        again.fetch_tokenizer()
        again.fetch_weights()
    assert hub.fetched == [] and sum("/tree/" in path for path in hub.asked) == 1


@pytest.mark.parametrize("answer", [(403, {}), (403, {"X-Error-Code": "GatedRepo"}), (401, {})])
def test_a_list_that_cannot_be_had(serve: Serve, sharded_model: Path, answer: tuple[int, dict[str, str]]) -> None:
    hub = serve(repository_of(sharded_model))
    notes: list[str] = []
    source = resolve_model(ID, {}, False, notes.append)
    put_by_another(source, sharded_model, "tokenizer.json")
    hub.repositories = {ID: Repository(answer=answer)}
    source.fetch_tokenizer()
    assert "no list of the files" in notes[-1] and not kept_listing(source).exists()
    (source.path / "tokenizer.json").unlink()
    with pytest.raises(ModelError):
        source.fetch_tokenizer()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"tokenizer.json": "1"}', '{"tokenizer.json": -1}', "[" * 100_000])
def test_a_damaged_list_is_asked_for_again(serve: Serve, sharded_model: Path, content: str) -> None:
    hub = serve(repository_of(sharded_model))
    source = resolve_model(ID, {}, False)
    source.fetch_tokenizer()
    whole = kept_listing(source).read_text(encoding="utf-8")
    kept_listing(source).write_text(content, encoding="utf-8")
    hub.asked.clear()
    resolve_model(ID, {}, False).fetch_tokenizer()
    assert hub.fetched == [] and any("/tree/" in path for path in hub.asked)
    assert kept_listing(source).read_text(encoding="utf-8") == whole


def test_no_place_for_a_list(serve: Serve, sharded_model: Path, tmp_path: Path) -> None:
    serve(repository_of(sharded_model))
    (tmp_path / "file").write_text("no directory", encoding="utf-8")
    source = resolve_model(ID, {"TIDEKV_CACHE_DIR": str(tmp_path / "file")}, False)
    source.fetch_tokenizer()
    source.fetch_weights()
    assert all((source.path / path.name).is_file() for path in sharded_model.iterdir())


def test_a_hub_that_is_gone_before_its_list(
    monkeypatch: pytest.MonkeyPatch, serve: Serve, hub_cache: Path, sharded_model: Path, waited: list[float]
) -> None:
    serve(repository_of(sharded_model))
    notes: list[str] = []
    source = resolve_model(ID, {}, False, notes.append)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        point_at(monkeypatch, hub_cache, f"http://127.0.0.1:{taken.getsockname()[1]}")
        for fetch in (source.fetch_tokenizer, source.fetch_weights):
            with pytest.raises(ModelError, match="the hub cannot be reached"):
                fetch()
        put_by_another(source, sharded_model, "tokenizer.json")
        source.fetch_tokenizer()
    assert "no list of the files" in notes[-1] and waited == []
