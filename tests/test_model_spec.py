"""Shapes from configs and GGUF headers, and what is refused before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFValueType
from transformers import PreTrainedModel

from tests.builders import llama_metadata, llama_tensors, tiny_causal_model, write_gguf, write_llama_gguf
from tidekv_cli.errors import ModelError
from tidekv_cli.model_spec import ModelSpec, Traits, inspect_model, spec_from_config


def config_of(model: PreTrainedModel, **changes: Any) -> dict[str, Any]:
    """What `save_pretrained` would write, with `changes`."""
    written = json.loads(model.config.to_json_string(use_diff=False))
    return {**written, "architectures": [type(model).__name__], **changes}


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    """One tiny Llama for all tests here."""
    return tiny_causal_model()


def assert_refused(config: dict[str, Any], *words: str) -> None:
    with pytest.raises(ModelError) as caught:
        spec_from_config(config, "some/where")
    for word in ("some/where", *words):
        assert word in caught.value.message
    assert caught.value.hint


def test_the_embedded_models_shapes(embedded_path: Path) -> None:
    spec = inspect_model(embedded_path).spec
    assert (spec.layers, spec.heads, spec.kv_heads, spec.head_dim, spec.context_window) == (30, 9, 3, 64, 8192)
    assert spec.tied_embeddings


def test_the_same_shapes_from_config_and_from_gguf(tmp_path: Path, llama: PreTrainedModel) -> None:
    expected = ModelSpec(
        architecture="LlamaForCausalLM",
        layers=2,
        hidden_size=64,
        heads=4,
        kv_heads=2,
        head_dim=16,
        vocab_size=96,
        context_window=512,
        tied_embeddings=False,
        traits=Traits(widest_head=16),
    )
    llama.save_pretrained(tmp_path / "directory")
    assert inspect_model(tmp_path / "directory").spec == expected
    files = inspect_model(write_llama_gguf(tmp_path / "file.gguf", llama))
    assert files.spec == expected and files.gguf is not None


def test_values_that_a_config_may_leave_out(llama: PreTrainedModel) -> None:
    config = config_of(llama, max_position_embeddings=None)
    for key in ("head_dim", "num_key_value_heads", "tie_word_embeddings", "attention_bias", "mlp_bias"):
        del config[key]
    spec = spec_from_config(config, "here")
    assert (spec.head_dim, spec.kv_heads, spec.context_window) == (16, 4, None)
    assert not spec.tied_embeddings


def test_a_placeholder_is_no_window(llama: PreTrainedModel) -> None:
    assert spec_from_config(config_of(llama, max_position_embeddings=int(1e30)), "here").context_window is None
    assert spec_from_config(config_of(llama, max_position_embeddings=0), "here").context_window is None


@pytest.mark.parametrize(
    "architectures", [["MixtralForCausalLM"], ["GemmaForCausalLM"], ["BambaForCausalLM"], ["BertModel"]]
)
def test_other_architectures(llama: PreTrainedModel, architectures: list[str]) -> None:
    assert_refused(config_of(llama, architectures=architectures), architectures[0])


@pytest.mark.parametrize("architectures", [None, []])
def test_no_architecture(llama: PreTrainedModel, architectures: object) -> None:
    assert_refused(config_of(llama, architectures=architectures), "none stated")


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes"])
def test_quantised_checkpoints(llama: PreTrainedModel, method: str) -> None:
    assert_refused(config_of(llama, quantization_config={"quant_method": method}), method)
    assert_refused(config_of(llama, quantization_config={"bits": 4}), "unnamed")


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn", "dynamic", "longrope"])
def test_rotations(llama: PreTrainedModel, kind: str) -> None:
    assert spec_from_config(config_of(llama, rope_parameters={"rope_type": kind, "factor": 2.0}), "here").layers == 2


@pytest.mark.parametrize("key", ["num_attention_heads", "hidden_size", "num_hidden_layers", "vocab_size"])
@pytest.mark.parametrize("value", ["missing", None, "many", [4], {}])
def test_shapes_that_are_no_numbers(llama: PreTrainedModel, key: str, value: object) -> None:
    config = config_of(llama, **{key: value})
    if value == "missing":
        del config[key]
    assert_refused(config)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 0},
        {"num_attention_heads": 0},
        {"hidden_size": 0},
        {"num_key_value_heads": 0},
        {"head_dim": -16},
        {"vocab_size": 0},
    ],
)
def test_impossible_shapes(llama: PreTrainedModel, changes: dict[str, int]) -> None:
    assert_refused(config_of(llama, **changes), "at least 1", *changes)


@pytest.mark.parametrize("kv_heads", [3, 8])
def test_heads_that_do_not_divide(llama: PreTrainedModel, kv_heads: int) -> None:
    assert_refused(config_of(llama, num_key_value_heads=kv_heads), "impossible", f"4/{kv_heads}")


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": 5},
        {"architectures": {"a": 1}},
        {"architectures": [5]},
        {"architectures": "LlamaForCausalLM"},
        {"quantization_config": "gptq"},
        {"quantization_config": [1]},
        {"rope_parameters": [1]},
        {"rope_parameters": {"rope_theta": "x"}},
        {"rope_parameters": {"rope_theta": 0.0}},
        {"rope_theta": -1.0},
        {"layer_types": 5},
        {"layer_types": [5, 5]},
        {"layer_types": ["full_attention"]},
        {"rms_norm_eps": "small"},
        {"rms_norm_eps": float("nan")},
        {"rms_norm_eps": -1e-5},
        {"max_position_embeddings": "many"},
        {"max_position_embeddings": float("inf")},
        {"tie_word_embeddings": "yes"},
        {"model_type": "mistral"},
        {"model_type": None},
        {"model_type": ["llama"]},
    ],
)
def test_values_of_the_wrong_type(llama: PreTrainedModel, changes: dict[str, Any]) -> None:
    assert_refused(config_of(llama, **changes))


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (None, "No such file"),
        ("", "no valid JSON"),
        ('{"architectures": ', "no valid JSON"),
        ("[]", "no JSON object"),
        ("[" * 100_000, "no valid JSON"),
        ('"text"', "no JSON object"),
    ],
)
def test_a_config_file_that_is_none(tmp_path: Path, content: str | None, word: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(ModelError, match=word) as caught:
        inspect_model(tmp_path)
    assert str(tmp_path / "config.json") in caught.value.message


def test_a_config_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ModelError, match=r"config\.json"):
        inspect_model(tmp_path)


def test_a_config_that_is_a_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ModelError, match=r"config\.json"):
        inspect_model(tmp_path)


@pytest.mark.parametrize("architecture", ["qwen2", "gemma", "mamba"])
def test_gguf_of_another_architecture(tmp_path: Path, architecture: str) -> None:
    path = write_gguf(tmp_path / "other.gguf", {"x.y": 1}, architecture=architecture)
    with pytest.raises(ModelError, match=architecture) as caught:
        inspect_model(path)
    assert str(path) in caught.value.message


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, "yarn"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.rope.scaling.type": "linear"}, "llama.rope.scaling.factor"),
        ({"llama.rope.dimension_count": 8}, "part of each head"),
        ({"llama.block_count": None}, "llama.block_count"),
        ({"llama.context_length": None}, "llama.context_length"),
        ({"llama.embedding_length": None}, "llama.embedding_length"),
        ({"llama.feed_forward_length": None}, "llama.feed_forward_length"),
        ({"llama.attention.head_count": None}, "llama.attention.head_count"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon"),
        ({"llama.attention.head_count": 0}, "num_attention_heads: 0"),
        ({"llama.attention.head_count_kv": 3}, "4/3 heads"),
        ({"llama.attention.head_count_kv": [2, 1]}, "no int"),
        ({"llama.attention.head_count": "four"}, "no int"),
        ({"llama.attention.layer_norm_rms_epsilon": "x"}, "no float"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "rms_norm_eps"),
        ({"llama.rope.freq_base": "x"}, "no float"),
        ({"llama.rope.freq_base": -1.0}, "rope_theta"),
        ({"llama.block_count": 4_000_000_000}, "4000000000"),
        ({"tokenizer.ggml.eos_token_id": "x"}, "no int"),
        ({"llama.block_count": (-2, GGUFValueType.INT32)}, "block_count -2"),
    ],
)
def test_gguf_headers_that_are_refused(
    tmp_path: Path, llama: PreTrainedModel, changes: dict[str, Any], word: str
) -> None:
    path = write_llama_gguf(tmp_path / "model.gguf", llama, changes=changes)
    with pytest.raises(ModelError, match=word) as caught:
        inspect_model(path)
    assert str(path) in caught.value.message


def test_gguf_without_tensors(tmp_path: Path, llama: PreTrainedModel) -> None:
    path = write_gguf(tmp_path / "bare.gguf", llama_metadata(llama.config))
    with pytest.raises(ModelError, match="tensors of 0 layers"):
        inspect_model(path)
    tensors = llama_tensors(llama)
    del tensors["token_embd.weight"]
    with pytest.raises(ModelError, match=r"token_embd\.weight"):
        inspect_model(write_gguf(tmp_path / "headless.gguf", llama_metadata(llama.config), tensors))


def test_what_a_gguf_header_may_leave_out(tmp_path: Path, llama: PreTrainedModel) -> None:
    left_out = ("attention.head_count_kv", "attention.key_length", "rope.freq_base", "rope.dimension_count")
    path = write_llama_gguf(tmp_path / "model.gguf", llama, changes={f"llama.{key}": None for key in left_out})
    spec = inspect_model(path).spec
    assert (spec.kv_heads, spec.head_dim) == (4, 16)
