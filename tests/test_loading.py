"""Weights and tokenizers from both formats: bit for bit what was saved, and damage named."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from torch import Tensor
from transformers import PreTrainedModel

from tests.builders import (
    byte_level_tokenizer,
    gguf_name,
    half_by_half,
    llama_metadata,
    llama_tensors,
    tiny_causal_model,
    write_gguf,
    write_hugging_face,
    write_llama_gguf,
)
from tidekv_cli.engine.meter import LiveMeter
from tidekv_cli.errors import ModelError
from tidekv_cli.loading import LoadedModel, end_tokens, load_model, load_tokenizer
from tidekv_cli.model_spec import inspect_model

KIND = GGMLQuantizationType
ROOT = Path(__file__).parent.parent
BIASES = {"attention_bias": True, "mlp_bias": True}


def load(path: Path, dtype: torch.dtype = torch.float32) -> LoadedModel:
    return load_model(inspect_model(path), dtype)


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    """One tiny Llama with an untied head."""
    return tiny_causal_model()


@pytest.fixture
def directory(tmp_path: Path, llama: PreTrainedModel) -> Path:
    """It as a Hugging Face directory, to be damaged."""
    return write_hugging_face(tmp_path / "directory", llama)


def assert_same_weights(model: PreTrainedModel, expected: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    found = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert found[name].dtype == dtype and torch.equal(found[name], weight.to(dtype)), name


def assert_refused(path: Path, *words: str) -> None:
    with pytest.raises(ModelError) as caught:
        load(path)
    for word in (str(path), *words):
        assert word in caught.value.message
    assert caught.value.hint


@torch.no_grad()
def logits(model: PreTrainedModel, first_position: int = 0) -> Tensor:
    ids = torch.arange(24)[None] * 7 % model.config.vocab_size
    model.set_attn_implementation("eager")
    return model(ids, position_ids=torch.arange(24)[None] + first_position).logits


# Hugging Face directories


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shard_size", ["1GB", "40KB"])
def test_a_directory(tmp_path: Path, llama: PreTrainedModel, dtype: torch.dtype, shard_size: str) -> None:
    path = write_hugging_face(tmp_path / "model", llama, shard_size)
    assert (len(list(path.glob("*.safetensors"))) > 1) == (shard_size == "40KB")
    loaded = load(path, dtype)
    assert_same_weights(loaded.model, dict(llama.named_parameters()), dtype)
    assert not loaded.model.training and not any(weight.requires_grad for weight in loaded.model.parameters())


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_directory_of_each_architecture(tmp_path: Path, model_type: str, tied: bool) -> None:
    model = tiny_causal_model(model_type, tie_word_embeddings=tied)
    loaded = load(write_hugging_face(tmp_path / "model", model)).model
    assert_same_weights(loaded, dict(model.named_parameters()), torch.float32)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert torch.equal(logits(loaded), logits(model))


def test_the_tokenizer_of_a_directory(directory: Path) -> None:
    tokenizer, built = load_tokenizer(inspect_model(directory)), byte_level_tokenizer()
    text = "The theory and the 12 things, naïve café 🙂\n\tend<|im_end|>"
    assert tokenizer(text)["input_ids"] == built(text)["input_ids"]
    assert tokenizer.eos_token_id == built.eos_token_id


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        (2, [2, 5, 7], {2, 5, 7}),
        ([3, 4], None, {3, 4}),
        (2, 9, {2, 9}),
        (None, 4, {4}),
        (None, None, set()),
        (0, [0], {0}),
    ],
)
def test_end_tokens_of_a_directory(directory: Path, in_config: object, in_generation: object, expected: set) -> None:
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    (directory / "config.json").write_text(json.dumps({**config, "eos_token_id": in_config}), encoding="utf-8")
    generation = {} if in_generation is None else {"eos_token_id": in_generation}
    (directory / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    assert load(directory).end_token_ids == expected


def test_no_generation_config(directory: Path) -> None:
    (directory / "generation_config.json").unlink()
    assert load(directory).end_token_ids == {2}


@pytest.mark.parametrize(
    "content", ["{", "[]", "[" * 100_000, '{"eos_token_id": [[1]]}', '{"eos_token_id": "x"}', '{"eos_token_id": [1.5]}']
)
def test_a_damaged_generation_config(directory: Path, content: str) -> None:
    (directory / "generation_config.json").write_text(content, encoding="utf-8")
    assert_refused(directory)


@pytest.mark.parametrize("sampling", [{"temperature": 0.6, "top_p": 0.9, "do_sample": True}, {"top_p": 7, "junk": []}])
def test_other_keys_of_a_generation_config(directory: Path, sampling: dict[str, Any]) -> None:
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 9, **sampling}), encoding="utf-8")
    assert load(directory).end_token_ids == {2, 9}


def test_weights_with_more_layers_than_the_config(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    fewer = {**config, "num_hidden_layers": 1, "layer_types": None}
    (directory / "config.json").write_text(json.dumps(fewer), encoding="utf-8")
    assert_refused(directory, "layers.1.")


def test_truncated_safetensors(directory: Path) -> None:
    file = directory / "model.safetensors"
    blob = file.read_bytes()
    for length in (0, 4, 100, len(blob) // 2, len(blob) - 1):
        file.write_bytes(blob[:length])
        assert_refused(directory, str(file), "damaged")


def test_a_missing_shard(tmp_path: Path, llama: PreTrainedModel) -> None:
    path = write_hugging_face(tmp_path / "model", llama, "40KB")
    lost = sorted(path.glob("*.safetensors"))[1]
    lost.unlink()
    assert_refused(path, lost.name)


def test_a_truncated_shard(tmp_path: Path, llama: PreTrainedModel) -> None:
    path = write_hugging_face(tmp_path / "model", llama, "40KB")
    cut = sorted(path.glob("*.safetensors"))[-1]
    cut.write_bytes(cut.read_bytes()[:-1])
    assert_refused(path, cut.name, "damaged")


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 5}'])
def test_a_damaged_index(tmp_path: Path, llama: PreTrainedModel, content: str) -> None:
    path = write_hugging_face(tmp_path / "model", llama, "40KB")
    (path / "model.safetensors.index.json").write_text(content, encoding="utf-8")
    assert_refused(path)


def test_only_a_pickle(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    assert_refused(directory, "pytorch_model.bin", "pickle")


def test_no_weights_at_all(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    assert_refused(directory, "no weights")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"num_hidden_layers": 3}, "model.layers.2."),
        ({"intermediate_size": 128}, "mlp.down_proj.weight as [64, 96], and its config.json asks for [64, 128]"),
        ({"num_key_value_heads": 4}, "self_attn.k_proj.weight as [32, 64], and its config.json asks for [64, 64]"),
        ({"hidden_act": "nonsense"}, "nonsense"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"model_type": "nonsense"}, "nonsense"),
        ({"model_type": None}, "model_type"),
    ],
)
def test_weights_of_another_config(directory: Path, changes: dict[str, Any], word: str) -> None:
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    (directory / "config.json").write_text(json.dumps({**config, **changes}), encoding="utf-8")
    assert_refused(directory, word)


def test_remote_code_does_not_run(directory: Path, tmp_path: Path) -> None:
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config["auto_map"] = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    ran = tmp_path / "ran"
    (directory / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass Evil: pass\n", encoding="utf-8")
    assert type(load(directory).model).__name__ == "LlamaForCausalLM"
    load_tokenizer(inspect_model(directory))
    assert not ran.exists()


def test_no_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json") as caught:
        load_tokenizer(inspect_model(directory))
    assert str(directory) in caught.value.message


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["", "{", "[]"])
def test_a_damaged_tokenizer(directory: Path, name: str, content: str) -> None:
    (directory / name).write_text(content, encoding="utf-8")
    with pytest.raises(ModelError, match="tokenizer") as caught:
        load_tokenizer(inspect_model(directory))
    assert str(directory) in caught.value.message


# GGUF files


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, BIASES], ids=["untied", "tied", "biases"])
def test_plain_gguf_equals_the_model(tmp_path: Path, changes: dict[str, Any], dtype: torch.dtype) -> None:
    model = tiny_causal_model(**changes)
    loaded = load(write_llama_gguf(tmp_path / "model.gguf", model), dtype).model
    assert_same_weights(loaded, dict(model.named_parameters()), dtype)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == model.config.tie_word_embeddings
    assert loaded.dtype == dtype and loaded.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(logits(loaded), logits(load(write_hugging_face(tmp_path / "directory", model), dtype).model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kind", [KIND.F16, KIND.BF16, KIND.Q8_0, KIND.Q4_0, KIND.Q4_1, KIND.Q5_0, KIND.Q5_1, KIND.Q4_K, KIND.Q6_K]
)
def test_quantised_gguf_equals_the_dequantised_tensors(
    tmp_path: Path, kind: GGMLQuantizationType, dtype: torch.dtype
) -> None:
    wide = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}  # K types pack 256 at a time
    model = tiny_causal_model(num_hidden_layers=1, **wide)
    packed = llama_tensors(model, kind)
    expected = {}
    for name, _ in model.named_parameters():
        values = quants.dequantize(*packed[gguf_name(name)])
        assert np.isfinite(values).all() and values.any()
        for part, heads in (("q_proj", 4), ("k_proj", 2)):
            if part in name:
                values = half_by_half(values, heads)
        expected[name] = torch.from_numpy(values.copy())
    path = write_gguf(tmp_path / "model.gguf", llama_metadata(model.config), packed)
    assert_same_weights(load(path, dtype).model, expected, dtype)


def test_unpacking_in_pieces(tmp_path: Path, llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_llama_gguf(tmp_path / "model.gguf", llama, KIND.Q4_1)
    whole = {name: weight.clone() for name, weight in load(path).model.named_parameters()}
    monkeypatch.setattr("tidekv_cli.gguf_weights._VALUES_AT_A_TIME", 7 * 32)
    assert_same_weights(load(path).model, whole, torch.float32)


class LiveOnTheCpu(LiveMeter):
    """Counts no storage of another device."""

    def _follow(self, tensor: Tensor, item: str) -> None:
        if tensor.device.type == "cpu":
            super()._follow(tensor, item)


@pytest.mark.parametrize("kind", [KIND.F32, KIND.Q4_1])
@pytest.mark.parametrize("tied", [False, True])
def test_gguf_for_another_device_is_made_there(tmp_path: Path, kind: GGMLQuantizationType, tied: bool) -> None:
    path = write_llama_gguf(tmp_path / "model.gguf", tiny_causal_model(tie_word_embeddings=tied), kind)
    files, peak = inspect_model(path), {}
    for device in ("cpu", "meta"):
        with LiveOnTheCpu() as meter:
            model = load_model(files, torch.float32, torch.device(device)).model
        tensors = [*model.parameters(), *model.buffers()]
        assert {tensor.device.type for tensor in tensors} == {device}
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        peak[device] = meter.peak_bytes
    assert peak["cpu"] >= sum(weight.nbytes for weight in model.parameters())
    largest = max(weight.nbytes for weight in model.parameters())
    assert peak["meta"] <= largest + 1024  # one at a time while the model is laid out, and frequencies


def llama3_factors(model: PreTrainedModel, rope: Mapping[str, float]) -> np.ndarray:
    """What llama.cpp's converter writes as `rope_freqs.weight` (the formula of the Llama 3.1 release)."""
    dim, base = model.config.head_dim, model.config.rope_parameters["rope_theta"]
    long = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
    short = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
    factors = []
    for i in range(0, dim, 2):
        wavelength = 2 * math.pi * base ** (i / dim)
        if wavelength < short:
            factors.append(1.0)
        elif wavelength > long:
            factors.append(rope["factor"])
        else:
            smooth = rope["original_max_position_embeddings"] / wavelength - rope["low_freq_factor"]
            smooth /= rope["high_freq_factor"] - rope["low_freq_factor"]
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


def test_llama3_rope_factors(tmp_path: Path) -> None:
    rope = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
    scaled = {"rope_type": "llama3", "rope_theta": 10000.0, **rope}
    model = tiny_causal_model(rope_parameters=scaled, max_position_embeddings=2048, head_dim=32, initializer_range=0.1)
    factors = llama3_factors(model, rope)
    assert factors.min() == 1 and factors.max() == 8 and len(set(factors.tolist())) > 3
    path, plain_path = tmp_path / "model.gguf", tmp_path / "plain.gguf"
    metadata, tensors = llama_metadata(model.config), llama_tensors(model)
    write_gguf(path, metadata, {**tensors, "rope_freqs.weight": (factors, KIND.F32)})
    write_gguf(plain_path, metadata, tensors)
    loaded, plain = load(path).model, load(plain_path).model
    assert_same_weights(loaded, dict(model.named_parameters()), torch.float32)
    model.set_attn_implementation("eager")
    scattered = torch.arange(24)[None] * 85  # up to position 1955
    with torch.no_grad():
        expected, found, unscaled = (
            each(torch.arange(24)[None], position_ids=scattered).logits for each in (model, loaded, plain)
        )
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert (unscaled - expected).abs().max() > 1e-2
    rotary = loaded.model.rotary_emb
    torch.testing.assert_close(rotary.inv_freq, model.model.rotary_emb.inv_freq, atol=0, rtol=2.5e-7)  # 2 ulp
    assert torch.equal(rotary.inv_freq, rotary.original_inv_freq)


def test_linear_rope_scaling(tmp_path: Path) -> None:
    model = tiny_causal_model(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 50000.0})
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    loaded = load(write_llama_gguf(tmp_path / "model.gguf", model, changes=scaling)).model
    assert torch.equal(logits(loaded, 400), logits(model, 400))
    plain = load(write_llama_gguf(tmp_path / "plain.gguf", model)).model
    assert not torch.allclose(logits(plain, 400), logits(model, 400), atol=1e-2)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"tokenizer.ggml.eos_token_id": 2}, {2}),
        ({"tokenizer.ggml.eos_token_id": 0}, {0}),
        ({"tokenizer.ggml.eot_token_id": 1, "tokenizer.ggml.eom_token_id": 5}, {1, 2, 5}),
        ({"tokenizer.ggml.eos_token_id": None}, set()),
    ],
)
def test_end_tokens_of_gguf(tmp_path: Path, llama: PreTrainedModel, changes: dict[str, Any], expected: set) -> None:
    assert load(write_llama_gguf(tmp_path / "model.gguf", llama, changes=changes)).end_token_ids == expected


@pytest.mark.parametrize("lost", ["blk.1.ffn_up.weight", "output_norm.weight", "blk.0.attn_q.weight"])
def test_gguf_lacks_a_tensor(tmp_path: Path, llama: PreTrainedModel, lost: str) -> None:
    tensors = llama_tensors(llama)
    del tensors[lost]
    assert_refused(
        write_gguf(tmp_path / "model.gguf", llama_metadata(llama.config), tensors),
        {"blk.1.ffn_up.weight": "layers.1.mlp.up_proj", "output_norm.weight": "model.norm"}.get(lost, "q_proj"),
    )


def test_gguf_with_more_or_fewer_layers_than_it_says(tmp_path: Path, llama: PreTrainedModel) -> None:
    assert_refused(write_llama_gguf(tmp_path / "fewer.gguf", llama, changes={"llama.block_count": 3}), "block_count 3")
    assert_refused(write_llama_gguf(tmp_path / "more.gguf", llama, changes={"llama.block_count": 1}), "block_count 1")


def test_gguf_with_an_unknown_tensor(tmp_path: Path, llama: PreTrainedModel) -> None:
    tensors = {**llama_tensors(llama), "blk.0.attn_extra.weight": (np.ones(4, np.float32), KIND.F32)}
    assert_refused(write_gguf(tmp_path / "model.gguf", llama_metadata(llama.config), tensors), "attn_extra")


@pytest.mark.parametrize(
    "name",
    [
        "blk.0.attn_v.weight",
        "blk.0.attn_q.weight",
        "blk.1.attn_k.weight",
        "output_norm.weight",
        "blk.1.ffn_down.weight",
    ],
)
def test_gguf_tensor_of_another_shape(tmp_path: Path, llama: PreTrainedModel, name: str) -> None:
    tensors = llama_tensors(llama)
    values, kind = tensors[name]
    tensors[name] = (np.ascontiguousarray(values[:-1]), kind)
    assert_refused(write_gguf(tmp_path / "model.gguf", llama_metadata(llama.config), tensors), "wrong shape")


@pytest.mark.parametrize("factors", [np.ones(1), np.ones(7), np.ones((8, 1)), np.zeros(8)])
def test_gguf_with_damaged_rope_factors(tmp_path: Path, llama: PreTrainedModel, factors: np.ndarray) -> None:
    tensors = {**llama_tensors(llama), "rope_freqs.weight": (factors.astype(np.float32), KIND.F32)}
    assert_refused(write_gguf(tmp_path / "model.gguf", llama_metadata(llama.config), tensors), "rope_freqs.weight")


def test_gguf_tensor_name_without_a_dot(tmp_path: Path, llama: PreTrainedModel) -> None:
    tensors = {**llama_tensors(llama), "nodot": (np.ones(4, np.float32), KIND.F32)}
    assert_refused(write_gguf(tmp_path / "model.gguf", llama_metadata(llama.config), tensors), "nodot")


def test_gguf_kind_that_cannot_be_unpacked(tmp_path: Path, llama: PreTrainedModel) -> None:
    tensors = {**llama_tensors(llama), "output_norm.weight": (np.ones(64, np.int32), KIND.I32)}
    with pytest.raises(ModelError, match="I32"):
        load(write_gguf(tmp_path / "model.gguf", llama_metadata(llama.config), tensors))


def test_truncated_gguf(tmp_path: Path, llama: PreTrainedModel) -> None:
    path = write_llama_gguf(tmp_path / "model.gguf", llama)
    path.write_bytes(path.read_bytes()[:-4000])
    assert_refused(path, "truncated")


# The embedded model


def test_the_embedded_tokenizer_round_trips_the_examples(embedded_tokenizer: Any) -> None:
    for name in ("lighthouse.txt", "garden.txt"):
        text = (ROOT / "examples" / name).read_text(encoding="utf-8")
        ids = embedded_tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        assert len(ids) < len(text) / 3
        assert embedded_tokenizer.decode(ids) == text


def test_the_embedded_model_is_whole(embedded_model: LoadedModel, embedded_tokenizer: Any) -> None:
    model = embedded_model.model
    assert all(weight.isfinite().all() for weight in model.parameters())
    assert model.config.vocab_size == len(embedded_tokenizer) == 49152
    assert embedded_model.end_token_ids == {embedded_tokenizer.eos_token_id}
    assert embedded_tokenizer.eos_token == "<|im_end|>" and embedded_tokenizer.chat_template


@torch.no_grad()
def test_the_embedded_model_knows_english(embedded_model: LoadedModel, embedded_tokenizer: Any) -> None:
    ids = embedded_tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    best = embedded_model.model(ids).logits[0, -1].topk(3).indices
    assert " Paris" in [embedded_tokenizer.decode(token) for token in best]


TURNS = "{% for m in messages %}{{ '<|im_start|>' + m['content'] + '<|im_end|>' }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (None, set()),
        (TURNS, {"<|im_end|>"}),
        (TURNS.replace("<|im_end|>", " <|im_end|>\n<|im_start|>"), {"<|im_end|>"}),
        ("{{ messages[-1]['content'] }}", set()),
        ("{{ raise_exception('no answers') }}", set()),
        ("{{ nothing.at.all }}", set()),
    ],
)
def test_end_tokens_of_a_tokenizer(template: str | None, expected: set[str]) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = template
    tokenizer.eos_token = "<|endoftext|>"
    names = expected | {"<|endoftext|>"}
    assert end_tokens(tokenizer) == set(tokenizer.convert_tokens_to_ids(sorted(names)))


def test_a_tokenizer_without_any_end() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.eos_token = None
    assert end_tokens(tokenizer) == frozenset()


def test_a_tokenizer_that_does_not_say_where_tokens_begin(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        is_fast = False

    monkeypatch.setattr("tidekv_cli.loading.AutoTokenizer.from_pretrained", lambda *_, **__: Slow())
    with pytest.raises(ModelError, match="is a Slow"):
        load_tokenizer(inspect_model(directory))


@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation"])
def test_attention_that_a_config_names_is_replaced(tiny_directory: str, key: str) -> None:
    path = Path(tiny_directory) / "config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(values | {key: "flash_attention_2"}), encoding="utf-8")
    assert load_model(inspect_model(Path(tiny_directory)), torch.float32).model.config._attn_implementation == "eager"
