"""Directories as they come: shards that are missing, heads stored twice or not at all, tensors beyond the model's."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.architectures import tiny_architecture
from tests.builders import tiny_causal_model, write_hugging_face
from tidekv_cli.checkpoint_files import has_tokenizer, missing_weights, weight_files
from tidekv_cli.errors import ModelError
from tidekv_cli.loading import load_model
from tidekv_cli.model_spec import inspect_model

INDEX = "model.safetensors.index.json"


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A tiny Llama in several files."""
    return write_hugging_face(tmp_path / "shards", tiny_causal_model(), "40KB")


def load(path: Path) -> Any:
    return load_model(inspect_model(path), torch.float32).model


def add_tensors(path: Path, **more: torch.Tensor) -> None:
    """Tensors beside those of `model.safetensors`, a dot in a name written `__`."""
    file = path / "model.safetensors"
    save_file({**load_file(file), **{name.replace("__", "."): value for name, value in more.items()}}, file)


def change_config(path: Path, **changes: object) -> None:
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    (path / "config.json").write_text(json.dumps({**config, **changes}), encoding="utf-8")


def test_tensors_that_are_not_the_models(tmp_path: Path) -> None:
    path = write_hugging_face(tmp_path / "model", tiny_causal_model())
    file, name = path / "model.safetensors", "model.layers.1.self_attn.q_proj.weight"
    tensors = load_file(file)
    weight = tensors[name]
    for wrong, words in (
        (weight[:-1], rf"{name} as \[{len(weight) - 1}, .*asks for \[{len(weight)}, "),
        (weight[:0], f"{name}, which is empty"),
        (weight.to(torch.int8), f"{name} as I8, and its config.json says nothing of quantisation"),
    ):
        save_file({**tensors, name: wrong.contiguous()}, file, metadata={"format": "pt"})
        with pytest.raises(ModelError, match=words):
            load(path)


# Which files


def test_files_of_weights(shards: Path) -> None:
    names = sorted(path.name for path in shards.glob("*.safetensors"))
    assert weight_files(shards) == names and len(names) > 2 and missing_weights(shards) == []
    assert has_tokenizer(shards)
    for name in names[1:]:
        (shards / name).unlink()
    assert weight_files(shards) == names and missing_weights(shards) == names[1:]
    with pytest.raises(ModelError, match=f"lacks {len(names) - 1} of its {len(names)} files.*{names[1]}"):
        load(shards)


def test_other_safetensors_are_left_alone(shards: Path, tmp_path: Path) -> None:
    (shards / "consolidated.safetensors").write_bytes(b"damaged")
    load(shards)
    whole = write_hugging_face(tmp_path / "whole", tiny_causal_model())
    (whole / INDEX).write_text("{")
    assert weight_files(whole) == ["model.safetensors"]


def test_an_index_that_is_lost(shards: Path) -> None:
    (shards / INDEX).unlink()
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor") as caught:
        load(shards)
    assert str(shards) in caught.value.message and "other files" in caught.value.hint


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors", 5, ""])
def test_an_index_that_names_files_elsewhere(shards: Path, name: object) -> None:
    (shards / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": name}}), encoding="utf-8")
    with pytest.raises(ModelError, match="no file beside it"):
        weight_files(shards)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"weight_map": [1]}', '{"weight_map": {"a": []}}', "\udcff"])
def test_an_index_that_is_damaged(shards: Path, content: str) -> None:
    (shards / INDEX).write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelError, match="no index of weights") as caught:
        load(shards)
    assert str(shards / INDEX) in caught.value.message


# Heads


@pytest.mark.parametrize("stored", ["both", "embedding"])
def test_a_tied_head(tmp_path: Path, stored: str) -> None:
    model = tiny_causal_model(tie_word_embeddings=True)
    path = write_hugging_face(tmp_path / "model", model)
    assert "lm_head.weight" not in load_file(path / "model.safetensors")
    embedding = model.model.embed_tokens.weight
    if stored == "both":
        add_tensors(path, lm_head__weight=embedding.clone())
    loaded = load(path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight and torch.equal(loaded.lm_head.weight, embedding)


def test_an_untied_head_that_is_lost(tmp_path: Path) -> None:
    path = write_hugging_face(tmp_path / "model", tiny_causal_model())
    file = path / "model.safetensors"
    save_file({name: value for name, value in load_file(file).items() if name != "lm_head.weight"}, file)
    with pytest.raises(ModelError, match="lm_head"):
        load(path)


# Tensors that have no place


def test_frequencies_of_old_checkpoints(tmp_path: Path) -> None:
    path = write_hugging_face(tmp_path / "model", tiny_causal_model())
    expected = load(path)
    add_tensors(
        path, **{f"model__layers__{layer}__self_attn__rotary_emb__inv_freq": torch.zeros(8) for layer in (0, 1)}
    )
    assert torch.equal(load(path).model.rotary_emb.inv_freq, expected.model.rotary_emb.inv_freq)


def test_layers_that_predict_further_tokens(tmp_path: Path) -> None:
    path = write_hugging_face(tmp_path / "model", tiny_architecture("glm4_moe"))
    layers = inspect_model(path).spec.layers
    extra = {f"model__layers__{layers}__eh_proj__weight": torch.zeros(4, 8)}
    extra[f"model__layers__{layers}__mlp__down_proj__weight"] = torch.zeros(4, 8)
    add_tensors(path, **extra)
    change_config(path, num_nextn_predict_layers=1)
    assert len(load(path).model.layers) == layers
    change_config(path, num_nextn_predict_layers=0)
    with pytest.raises(ModelError, match=rf"layers\.{layers}\."):
        load(path)


def test_a_part_for_further_tokens(tmp_path: Path) -> None:
    path = write_hugging_face(tmp_path / "model", tiny_causal_model())
    add_tensors(path, model__mtp__layers__0__proj__weight=torch.zeros(4, 8), mtp__norm__weight=torch.zeros(8))
    assert len(load(path).model.layers) == 2


def test_a_tensor_of_a_layer_that_is_not_the_models(tmp_path: Path) -> None:
    path = write_hugging_face(tmp_path / "model", tiny_causal_model())
    add_tensors(path, model__layers__1__self_attn__q_norm__weight=torch.zeros(16))
    with pytest.raises(ModelError, match="q_norm"):
        load(path)


# How


@pytest.mark.parametrize("before", [None, "0"])
def test_the_switch_of_transformers_is_put_back(
    shards: Path, monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    monkeypatch.delenv("HF_DEACTIVATE_ASYNC_LOAD", raising=False)
    if before is not None:
        monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", before)
    load(shards)
    assert os.environ.get("HF_DEACTIVATE_ASYNC_LOAD") == before
