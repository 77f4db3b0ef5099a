"""Tiny models, tokenizers and GGUF files written for a test. Knows nothing of what is tested."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, quants
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_ADD = {bool: "add_bool", int: "add_uint32", float: "add_float32", str: "add_string", list: "add_array"}
_SCALES = {GGMLQuantizationType.Q4_K: (0, 2), GGMLQuantizationType.Q6_K: (208,)}  # where a block has its float16s


def tiny_causal_model(model_type: str = "llama", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A seeded random float32 model with two layers."""
    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 2.0**-17,  # the same in float32, which is what GGUF keeps
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
    }
    if model_type in ("mistral", "qwen2", "qwen3"):
        shape["sliding_window"] = None
    config = AutoConfig.for_model(model_type, **{**shape, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    for name, weight in model.named_parameters():  # norms of one and biases of zero would hide a mix-up
        if weight.ndim == 1:
            weight.copy_(torch.rand_like(weight) + (0.5 if name.endswith("norm.weight") else -0.5))
    return model


def byte_level_parts() -> tuple[list[str], list[str], list[str]]:
    """A small byte-level vocabulary: its tokens in id order, its merges, its control tokens."""
    merges = ["t h", "th e", "Ġ the", "a n", "an d", "Ġ and", "i n", "in g", "1 2", "' s", "Ġ Ġ", "h e", "o u"]
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    return control + letters + [merge.replace(" ", "") for merge in merges], merges, control


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of `byte_level_parts`, put together from the tokenizers library itself."""
    tokens, merges, control = byte_level_parts()
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[tuple(merge.split(" ")) for merge in merges]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", bos_token="<|endoftext|>", clean_up_tokenization_spaces=False
    )


def byte_level_metadata() -> dict[str, Any]:
    """The same tokenizer as GGUF keys."""
    tokens, merges, control = byte_level_parts()
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in control else 1 for token in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": tokens.index("<|endoftext|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
    }


def sentencepiece_parts() -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and types of a small sentencepiece vocabulary with byte fallback."""
    special = ["<unk>", "<s>", "</s>"]
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["▁t", "he", "▁the", "▁a", "nd", "▁and", "▁▁", "in", "ing", "lo", "llo", "hello", "▁hello", "▁he"]
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz.,é"]
    tokens = special + fallback + pieces + letters
    scores = [0.0] * (len(special) + 256) + [-float(rank) for rank in range(len(pieces))] + [-1000.0] * len(letters)
    types = [2, 3, 3] + [6] * 256 + [1] * (len(pieces) + len(letters))
    return tokens, scores, types


def sentencepiece_metadata() -> dict[str, Any]:
    """The tokenizer of `sentencepiece_parts` as GGUF keys."""
    tokens, scores, types = sentencepiece_parts()
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, tuple[np.ndarray, GGMLQuantizationType]] | None = None,
    architecture: str = "llama",
    alignment: int | None = None,
) -> Path:
    """A GGUF file. A `metadata` value's type follows from Python's, or is given as (value, GGUFValueType).

    `tensors` are packed already: uint8 rows for quantised types, else floats.
    """
    writer = GGUFWriter(path, architecture)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for key, value in (metadata or {}).items():
        if isinstance(value, tuple):
            writer.add_key_value(key, value[0], value[1], None)
        else:
            getattr(writer, _ADD[type(value)])(key, value)
    for name, (packed, kind) in (tensors or {}).items():
        writer.add_tensor(name, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def packed_as(values: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """`values` as the bytes or floats of `kind`; where gguf has no encoder, seeded random blocks of that size."""
    if kind not in _SCALES:
        return quants.quantize(values, kind)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(values.size)
    blocks = random.integers(0, 256, (values.size // block, block_bytes), dtype=np.uint8)
    for offset in _SCALES[kind]:
        scale = random.uniform(-0.01, 0.01, len(blocks)).astype(np.float16)
        blocks[:, offset : offset + 2] = scale.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(*values.shape[:-1], -1)


def side_by_side(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of Q or K in llama.cpp's order: within a head, row i of the first half, then row i of the second."""
    size = len(weight) // heads
    order = [head * size + half * (size // 2) + i for head in range(heads) for i in range(size // 2) for half in (0, 1)]
    return weight[order]


def half_by_half(weight: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of `side_by_side`."""
    size = len(weight) // heads
    order = [head * size + 2 * i + half for head in range(heads) for half in (0, 1) for i in range(size // 2)]
    return weight[order]


def gguf_name(name: str) -> str:
    """llama.cpp's name of a Hugging Face parameter."""
    stem, _, suffix = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{_GGUF_NAMES[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_GGUF_NAMES[part]}.{suffix}"


def llama_metadata(config: Any) -> dict[str, Any]:
    """The GGUF keys of a Llama config, rope scaling left out."""
    return {
        "llama.block_count": config.num_hidden_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.key_length": config.head_dim,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "llama.rope.dimension_count": config.head_dim,
        **byte_level_metadata(),
    }


def llama_tensors(
    model: PreTrainedModel, kind: GGMLQuantizationType = GGMLQuantizationType.F32
) -> dict[str, tuple[np.ndarray, GGMLQuantizationType]]:
    """The model's tensors as llama.cpp's converter stores them: matrices as `kind`, vectors as float32."""
    config, tensors = model.config, {}
    for name, weight in model.named_parameters():  # a tied head is listed once
        values = weight.numpy()
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if part in name:
                values = side_by_side(values, heads)
        used = kind if values.ndim == 2 else GGMLQuantizationType.F32
        tensors[gguf_name(name)] = (packed_as(values, used), used)
    return tensors


def write_llama_gguf(
    path: Path,
    model: PreTrainedModel,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    changes: Mapping[str, Any] | None = None,
) -> Path:
    """The model as a GGUF file; `changes` to the metadata, None removes a key."""
    metadata = {**llama_metadata(model.config), **(changes or {})}
    kept = {key: value for key, value in metadata.items() if value is not None}
    return write_gguf(path, kept, llama_tensors(model, kind))


def write_hugging_face(path: Path, model: PreTrainedModel, shard_size: str = "1GB") -> Path:
    """The model and the byte-level tokenizer as a Hugging Face directory."""
    model.save_pretrained(path, max_shard_size=shard_size)
    byte_level_tokenizer().save_pretrained(path)
    return path
