"""Shapes by name, for planning: exact, from as little as possible, and never from weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from tests.builders import tiny_causal_model, write_hugging_face, write_llama_gguf
from tests.cli_runner import run_cli
from tests.hub_server import COMMIT, Repository, serving
from tidekv_cli import catalog
from tidekv_cli.catalog import ALIASES, HUB_ALIASES, shape_of
from tidekv_cli.errors import ModelError
from tidekv_cli.few_layers import few_layers
from tidekv_cli.model_shape import model_shape
from tidekv_cli.model_spec import inspect_model, spec_from_config

PARAMETERS = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b-v0.2": 7_241_732_096,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "smollm2-135m": 134_515_008,
    "smollm2-1.7b": 1_711_376_384,
    "phi-3.5-mini": 3_821_079_552,
}
# Layers, query heads, KV heads, head size, window.
SHAPES = {
    "llama-3.1-8b": (32, 32, 8, 128, 131072),
    "llama-3.2-1b": (16, 32, 8, 64, 131072),
    "llama-3.2-3b": (28, 24, 8, 128, 131072),
    "mistral-7b-v0.2": (32, 32, 8, 128, 32768),
    "qwen2.5-7b": (28, 28, 4, 128, 32768),
    "qwen3-8b": (36, 32, 8, 128, 40960),
    "smollm2-135m": (30, 9, 3, 64, 8192),
    "smollm2-1.7b": (24, 32, 32, 64, 8192),
    "phi-3.5-mini": (32, 32, 32, 96, 131072),
}


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test here may reach the hub, nor see what is in the user's cache."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What asks for a model on disk, or for the network, fails."""

    def forbidden(*arguments: object, **named: object) -> None:
        raise AssertionError("more than the shipped shape was asked")

    for name in ("resolve_model", "inspect_model"):
        monkeypatch.setattr(f"tidekv_cli.model_shape.{name}", forbidden)


def silent(text: str) -> None:
    pass


def snapshot(tmp_path: Path, name: str = "some-org/some-model", **files: str) -> Path:
    """A snapshot of the hub's cache that holds `files`, a dot in a name written `__`."""
    repository = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
    directory = repository / "snapshots" / COMMIT
    directory.mkdir(parents=True)
    for key, content in files.items():
        (directory / key.replace("__", ".")).write_text(content, encoding="utf-8")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return directory


# The shapes that are shipped


def test_every_alias_ships_its_shape() -> None:
    assert {*ALIASES, *HUB_ALIASES} == set(PARAMETERS) == set(SHAPES)
    shipped = {path.stem for path in (Path(catalog.__file__).parent / "shapes").glob("*.json")}
    assert shipped == set(PARAMETERS)
    assert shape_of("no-such") is None and shape_of("../shapes/qwen3-8b") is None and shape_of("") is None


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.usefixtures("no_disk")
def test_a_shipped_shape_is_exact(name: str) -> None:
    spec, config = model_shape(name, {}, True, silent)
    assert (spec.layers, spec.heads, spec.kv_heads, spec.head_dim, spec.context_window) == SHAPES[name]
    shape = shape_of(name)
    assert shape is not None and spec == spec_from_config(shape, name)
    assert spec_from_config(config, name) == spec


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_model_of_a_shape_has_these_weights(name: str) -> None:
    spec, config = model_shape(name, {}, True, silent)
    found = few_layers(json.dumps(config), spec.context_window, torch.bfloat16)
    assert found.weight_bytes == 2 * PARAMETERS[name] and len(found.stand_ins) == spec.layers


def test_the_default_models_shape_is_that_of_its_file(embedded_path: Path) -> None:
    files = inspect_model(embedded_path)
    spec, config = model_shape("smollm2-135m", {}, True, silent)
    assert spec == files.spec
    assert config["rope_theta"] == files.config["rope_parameters"]["rope_theta"]
    for key in ("rms_norm_eps", "max_position_embeddings"):
        assert config[key] == pytest.approx(files.config[key], rel=1e-6)


# Models that are no aliases


def test_a_directory_and_a_file(tmp_path: Path) -> None:
    model = tiny_causal_model(vocab_size=512)
    directory = write_hugging_face(tmp_path / "model", model)
    spec, config = model_shape(str(directory), {}, True, silent)
    assert spec.vocab_size == 512 and config["num_hidden_layers"] == spec.layers
    spec, config = model_shape(str(write_llama_gguf(tmp_path / "m.gguf", model)), {}, True, silent)
    assert spec.vocab_size == 512 and config["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.parametrize("name", ["no-such", "a/b/c", "/no/such/place", "x.gguf", ""])
def test_names_that_mean_nothing(name: str) -> None:
    with pytest.raises(ModelError) as caught:
        model_shape(name, {}, True, silent)
    assert caught.value.hint


def test_a_hub_model_on_disk_needs_no_network(tmp_path: Path) -> None:
    snapshot(tmp_path, config__json=json.dumps(shape_of("qwen3-8b")))
    for offline in (False, True):
        notes: list[str] = []
        spec, _ = model_shape("some-org/some-model", {}, offline, notes.append)
        assert spec.layers == SHAPES["qwen3-8b"][0] and not notes


def test_an_absent_hub_model_offline() -> None:
    with pytest.raises(ModelError, match="some-org/some-model is not on disk and --offline forbids"):
        model_shape("some-org/some-model", {}, True, silent)


def test_only_the_config_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"config.json": json.dumps(shape_of("qwen2.5-7b")).encode(), "model.safetensors": b"large"}
    with serving(monkeypatch, tmp_path / "hub", {"some-org/some-model": Repository(files)}) as hub:
        notes: list[str] = []
        spec, _ = model_shape("some-org/some-model", {}, False, notes.append)
    assert spec.layers == SHAPES["qwen2.5-7b"][0]
    assert hub.fetched == ["config.json"] and "some-org/some-model" in notes[0]


def test_a_hub_alias_without_a_shape_asks_for_its_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidekv_cli.model_shape.shape_of", lambda name: None)
    files = {"config.json": json.dumps(shape_of("qwen3-8b")).encode()}
    with serving(monkeypatch, tmp_path / "hub", {"Qwen/Qwen3-8B": Repository(files)}) as hub:
        assert model_shape("qwen3-8b", {}, False, silent)[0].layers == SHAPES["qwen3-8b"][0]
    assert hub.fetched == ["config.json"]


# Hub aliases at the command line


def complete(tmp_path: Path) -> Path:
    return snapshot(tmp_path, "Qwen/Qwen3-8B", config__json="{}", tokenizer__json="{}", model__safetensors="")


def test_models_list_says_what_is_on_disk(tmp_path: Path) -> None:
    rows = {line.split()[0]: line for line in run_cli("models", "list").out.splitlines()}
    for alias in HUB_ALIASES.values():
        assert alias.repository in rows[alias.name] and rows[alias.name].endswith("not fetched")
    directory = complete(tmp_path)
    rows = {line.split()[0]: line for line in run_cli("models", "list").out.splitlines()}
    assert rows["qwen3-8b"].endswith(str(directory)) and rows["qwen2.5-7b"].endswith("not fetched")
    (directory / "model.safetensors").unlink()
    rows = {line.split()[0]: line for line in run_cli("models", "list").out.splitlines()}
    assert rows["qwen3-8b"].endswith("not fetched")
    shutil.rmtree(tmp_path / "hub")
    (tmp_path / "hub").write_text("no directory")
    assert run_cli("models", "list").code == 0


def test_models_path_and_pull_of_a_hub_alias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_cli("models", "path", "qwen3-8b").assert_error(3, "Qwen/Qwen3-8B is not on disk")
    directory = complete(tmp_path)
    assert run_cli("models", "path", "qwen3-8b").out == f"{directory}\n"
    assert run_cli("models", "pull", "qwen3-8b").out == f"{directory}\n"
    shutil.rmtree(tmp_path / "hub")
    files = {path: path.encode() for path in ("config.json", "tokenizer.json", "model.safetensors")}
    with serving(monkeypatch, tmp_path / "hub", {"Qwen/Qwen3-8B": Repository(files)}) as hub:
        assert run_cli("models", "pull", "qwen3-8b").out == f"{directory}\n"
        for path in directory.iterdir():
            path.write_bytes(b"damaged")
        result = run_cli("models", "pull", "qwen3-8b", "--again")
    assert result.out == f"{directory}\n" and "fetching the weights of Qwen/Qwen3-8B" in result.err
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == files
    assert sorted(hub.fetched) == sorted([*files, *files])
    run_cli("models", "pull", "no-such").assert_error(3, "no-such", "qwen3-8b", "smollm2-135m")
