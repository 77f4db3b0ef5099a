"""The Hugging Face config that a GGUF header describes. Knows no weights."""

from __future__ import annotations

import re
from typing import Any

from tidekv_cli.errors import ModelError
from tidekv_cli.gguf_file import GgufFile


def config_from_gguf(file: GgufFile) -> dict[str, Any]:
    """A Llama config. Raises `ModelError` for what is not Llama-like, or where header and tensors disagree."""
    path = file.path
    if file.architecture != "llama":
        raise ModelError(
            f"{path} is of GGUF architecture {file.architecture!r}, which is not supported",
            "supported is 'llama' (Llama, SmolLM2, Mistral and others stored under that name)",
        )
    if file.value("llama.expert_count", int, 0):
        raise ModelError(f"{path} is a mixture of experts, which is not supported", "use a dense Llama-type model")
    layers = file.value("llama.block_count", int)
    _check_layers(file, layers)
    heads = file.value("llama.attention.head_count", int)
    hidden = file.value("llama.embedding_length", int)
    head_dim = file.value("llama.attention.key_length", int, hidden // max(heads, 1))
    if file.value("llama.rope.dimension_count", int, head_dim) != head_dim:
        raise ModelError(f"{path} rotates a part of each head only, which is not supported", "use another model")
    embeddings = file.tensors.get("token_embd.weight")
    if embeddings is None:
        raise ModelError(f"{path} lacks the tensor token_embd.weight", "use a complete GGUF file of a Llama model")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": file.value("llama.feed_forward_length", int),
        "num_attention_heads": heads,
        "num_key_value_heads": file.value("llama.attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "vocab_size": embeddings.shape[0],
        "max_position_embeddings": file.value("llama.context_length", int),
        "rms_norm_eps": file.value("llama.attention.layer_norm_rms_epsilon", float),
        "rope_parameters": _rope(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "bos_token_id": file.value("tokenizer.ggml.bos_token_id", int, None),
        "eos_token_id": file.value("tokenizer.ggml.eos_token_id", int, None),
        "pad_token_id": file.value("tokenizer.ggml.padding_token_id", int, None),
    }


def _check_layers(file: GgufFile, layers: int) -> None:
    """A damaged count must not build a million layers before the first tensor is looked for."""
    numbers = {int(match[1]) for name in file.tensors if (match := re.match(r"blk\.([0-9]{1,9})\.", name))}
    if numbers != set(range(min(layers, len(numbers) + 1))):
        raise ModelError(
            f"{file.path} says llama.block_count {layers} and holds tensors of {len(numbers)} layers",
            "use a complete GGUF file",
        )


def _rope(file: GgufFile) -> dict[str, Any]:
    scaling = file.value("llama.rope.scaling.type", str, "none")
    if scaling not in ("none", "linear"):
        raise ModelError(f"{file.path} uses rope scaling {scaling!r}, which is not supported", "use another file")
    rope = {"rope_type": "default", "rope_theta": file.value("llama.rope.freq_base", float, 10000.0)}
    if scaling == "linear":
        rope |= {"rope_type": "linear", "factor": file.value("llama.rope.scaling.factor", float)}
    return rope
