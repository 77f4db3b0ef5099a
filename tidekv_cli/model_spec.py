"""The shapes of a model, from `config.json` or a GGUF header. No torch, no weights, no memory formulas but its own.

Which architectures this version drives is decided here, so that others are refused before anything is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidekv_cli.errors import ModelError
from tidekv_cli.gguf_file import GgufFile, read_gguf

# Each is proven against the plain model by tests/test_adapter.py.
SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
# Frequencies of the other rope types depend on the longest position seen, so chunks would differ from the whole.
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_QKV_BIAS = ("Qwen2ForCausalLM",)
_HEAD_NORM = ("Qwen3ForCausalLM",)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shapes of a decoder-only model; `context_window` in tokens, None where the model states none."""

    architecture: str
    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context_window: int | None
    tied_embeddings: bool
    attention_bias: bool = False
    qkv_bias: bool = False
    mlp_bias: bool = False
    head_norm: bool = False

    @property
    def parameters(self) -> int:
        """Number of weights, tied embeddings counted once."""
        d, width = self.hidden_size, self.intermediate_size
        query, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = d * (query + 2 * kv) + query * d + 3 * d * width + 2 * d
        layer += (query + 2 * kv + d) * self.attention_bias + (query + 2 * kv) * self.qkv_bias
        layer += (2 * width + d) * self.mlp_bias + 2 * self.head_dim * self.head_norm
        embeddings = self.vocab_size * d * (1 if self.tied_embeddings else 2)
        return self.layers * layer + embeddings + d


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on disk whose header has been read: `path` is a directory, or a file and then `gguf` is its header."""

    path: Path
    spec: ModelSpec
    gguf: GgufFile | None


def inspect_model(path: Path) -> ModelFiles:
    """Read the shapes of the model at `path`. Raises `ModelError` for what is missing, damaged or unsupported."""
    if path.is_dir():
        return ModelFiles(path, spec_from_config(read_config(path), str(path)), None)
    gguf = read_gguf(path)
    return ModelFiles(path, spec_from_config(config_from_gguf(gguf), str(path)), gguf)


def read_config(directory: Path) -> dict[str, Any]:
    """`config.json` of a Hugging Face directory. Raises `ModelError` where it is missing or no JSON object."""
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(
            f"{path} cannot be read: {error.strerror or error}",
            "give a directory with config.json, tokenizer.json and *.safetensors, or a .gguf file",
        ) from error
    except ValueError as error:
        raise ModelError(f"{path} is no valid JSON: {error}", "fetch or copy the file again") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds no JSON object", "fetch or copy the file again")
    return config


def spec_from_config(config: Mapping[str, Any], source: str) -> ModelSpec:
    """Validate a Hugging Face config and take its shapes.

    Raises `ModelError`, naming the architecture, for anything that this version would compute wrongly.
    """
    architecture = (config.get("architectures") or ["none stated"])[0]
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise ModelError(
            f"{source} is of architecture {architecture}, which is not supported",
            f"supported are {', '.join(SUPPORTED_ARCHITECTURES)}",
        )
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise ModelError(
            f"{source} is quantised with {method}, which is not supported yet",
            "use the unquantised safetensors checkpoint or a GGUF file",
        )
    _refuse_rope(config, source)
    if _uses_sliding_window(config):
        raise ModelError(
            f"{source} has sliding-window layers (window {config.get('sliding_window')}), not supported yet",
            "use a model with full attention in every layer",
        )
    try:
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        spec = ModelSpec(
            architecture=architecture,
            layers=int(config["num_hidden_layers"]),
            hidden_size=hidden,
            intermediate_size=int(config["intermediate_size"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or (128 if architecture in _HEAD_NORM else hidden // heads)),
            vocab_size=int(config["vocab_size"]),
            context_window=_window(config.get("max_position_embeddings")),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", False)),
            qkv_bias=architecture in _QKV_BIAS,
            mlp_bias=bool(config.get("mlp_bias", False)),
            head_norm=architecture in _HEAD_NORM,
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(
            f"the config of {source} lacks a usable value: {error}", "fetch or copy the model again"
        ) from error
    if min(spec.layers, spec.heads, spec.kv_heads, spec.head_dim, spec.vocab_size) < 1 or heads % spec.kv_heads:
        raise ModelError(
            f"the config of {source} has impossible shapes: {spec.layers} layers, {heads}/{spec.kv_heads} heads",
            "fetch or copy the model again",
        )
    return spec


def _window(value: Any) -> int | None:
    """A stated window; the placeholders for "none" that tokenizers and configs use are not believed."""
    return int(value) if value and 0 < float(value) < 1e9 else None


def _refuse_rope(config: Mapping[str, Any], source: str) -> None:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in SUPPORTED_ROPE_TYPES:
        raise ModelError(
            f"{source} uses rope type {kind!r}, which is not supported yet",
            f"supported rope types are {', '.join(SUPPORTED_ROPE_TYPES)}",
        )


def _uses_sliding_window(config: Mapping[str, Any]) -> bool:
    layer_types = config.get("layer_types")
    if layer_types:
        return any(kind != "full_attention" for kind in layer_types)
    switched_off = config.get("use_sliding_window") is False
    # Mistral's config class has a window of 4096 where the file states none.
    default = 4096 if (config.get("architectures") or [""])[0] == "MistralForCausalLM" else None
    return config.get("sliding_window", default) is not None and not switched_off


def config_from_gguf(file: GgufFile) -> dict[str, Any]:
    """The Hugging Face config that a GGUF header describes. Raises `ModelError` for what is not Llama-like."""
    meta, path = file.metadata, file.path
    if file.architecture != "llama":
        raise ModelError(
            f"{path} is of GGUF architecture {file.architecture!r}, which is not supported",
            "supported is 'llama' (Llama, SmolLM2, Mistral and others stored under that name)",
        )
    if meta.get("llama.expert_count"):
        raise ModelError(f"{path} is a mixture of experts, which is not supported", "use a dense Llama-type model")
    scaling = meta.get("llama.rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise ModelError(f"{path} uses rope scaling {scaling!r}, which is not supported", "use another file")
    try:
        heads, hidden = meta["llama.attention.head_count"], meta["llama.embedding_length"]
        head_dim = meta.get("llama.attention.key_length", hidden // heads)
        rope: dict[str, Any] = {
            "rope_type": "default",
            "rope_theta": meta.get("llama.rope.freq_base", 10000.0),
        }
        if scaling == "linear":
            rope |= {"rope_type": "linear", "factor": meta["llama.rope.scaling.factor"]}
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": meta["llama.block_count"],
            "hidden_size": hidden,
            "intermediate_size": meta["llama.feed_forward_length"],
            "num_attention_heads": heads,
            "num_key_value_heads": meta.get("llama.attention.head_count_kv", heads),
            "head_dim": head_dim,
            "vocab_size": file.tensors["token_embd.weight"].shape[0],
            "max_position_embeddings": meta["llama.context_length"],
            "rms_norm_eps": meta["llama.attention.layer_norm_rms_epsilon"],
            "rope_parameters": rope,
            "tie_word_embeddings": "output.weight" not in file.tensors,
            "attention_bias": "blk.0.attn_q.bias" in file.tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
            "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": meta.get("tokenizer.ggml.eos_token_id"),
            "pad_token_id": meta.get("tokenizer.ggml.padding_token_id"),
        }
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise ModelError(f"the header of {path} lacks {error}", "use a complete GGUF file of a Llama model") from error
    if meta.get("llama.rope.dimension_count", head_dim) != head_dim:
        raise ModelError(f"{path} rotates a part of each head only, which is not supported", "use another model")
    return config
