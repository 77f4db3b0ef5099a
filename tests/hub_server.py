"""A stand-in for the Hugging Face hub on this machine: repositories of a few files, and a record of what is asked."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

HUB_ID = "some-org/some-model"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass(frozen=True)
class Repository:
    """`files` by name; `answer` is a status and headers that every request gets in their place."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    revisions: tuple[str, ...] = ("main", COMMIT)
    answer: tuple[int, Mapping[str, str]] | None = None


def repository_of(directory: Path, **more: bytes) -> Repository:
    """The files of `directory`, and `more`, a dot in a name written `__`."""
    files = {path.name: path.read_bytes() for path in directory.iterdir()}
    return Repository({**files, **{name.replace("__", "."): content for name, content in more.items()}})


class StandInHub:
    """Serves `repositories` by their id; `asked` lists the requested paths in order, without the server.

    `unsent` are files, with their sizes, that its lists name and that it then does not give.
    """

    def __init__(self, repositories: Mapping[str, Repository]) -> None:
        self.repositories = repositories
        self.asked: list[str] = []
        self.unsent: Mapping[str, int] = {}

    @property
    def fetched(self) -> list[str]:
        """Names of the files whose content was asked for, in order."""
        return [path.rpartition("/")[2] for path in self.asked if path.startswith("GET") and "/resolve/" in path]

    def respond(self, method: str, path: str) -> tuple[int, Mapping[str, str], bytes]:
        """Status, headers and body."""
        self.asked.append(f"{method} {path}")
        listing = path.startswith("/api/models/")
        parts = unquote(path).removeprefix("/api/models").strip("/").split("/")
        repository = self.repositories.get("/".join(parts[:2]))
        if repository is None:
            return 401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Invalid username or password."}, b""
        if repository.answer is not None:
            return *repository.answer, b""
        rest = "/".join(parts[3:])
        revision = next((name for name in repository.revisions if f"{rest}/".startswith(f"{name}/")), None)
        if revision is None:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        if listing:
            entries = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in repository.files.items()
            ]
            entries += [{"type": "file", "path": name, "size": n, "oid": ""} for name, n in self.unsent.items()]
            return 200, {"Content-Type": "application/json"}, json.dumps(entries).encode()
        content = repository.files.get(rest.removeprefix(f"{revision}/"))
        if content is None:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, b""
        return 200, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT}, content


Serve = Callable[[Repository], StandInHub]


@contextmanager
def serving(
    monkeypatch: pytest.MonkeyPatch, cache: Path, repositories: Mapping[str, Repository]
) -> Iterator[StandInHub]:
    """The hub, at the address that `huggingface_hub` asks, which keeps its files in `cache`."""
    hub = StandInHub(repositories)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, body = hub.respond(self.command, urlsplit(self.path).path)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    point_at(monkeypatch, cache, f"http://127.0.0.1:{server.server_port}")
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def point_at(monkeypatch: pytest.MonkeyPatch, cache: Path, address: str) -> None:
    """Let `huggingface_hub` ask `address`, without a token, and keep files in `cache`; lists of them stay beside it."""
    monkeypatch.setenv("HOME", str(cache.parent / "home"))
    monkeypatch.setenv("TIDEKV_CACHE_DIR", str(cache.parent / "home" / ".cache" / "tidekv"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
