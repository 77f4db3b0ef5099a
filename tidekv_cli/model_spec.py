"""The shapes of a model, from `config.json` or a GGUF header. No torch, no weights, no memory formulas but its own.

Which architectures this version drives is decided here, so that others are refused before anything is loaded.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidekv_cli.errors import ModelError
from tidekv_cli.gguf_config import config_from_gguf
from tidekv_cli.gguf_file import GgufFile, read_gguf

# By architecture, its `model_type`. Each is proven against the plain model by tests/test_adapter.py.
SUPPORTED_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
# Their sizes are known, so they can be planned; running them is refused.
PLANNABLE_ARCHITECTURES = {**SUPPORTED_ARCHITECTURES, "Phi3ForCausalLM": "phi3", "GemmaForCausalLM": "gemma"}
# Frequencies of the other rope types depend on the longest position seen, so chunks would differ from the whole.
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_QKV_BIAS = ("Qwen2ForCausalLM",)
_HEAD_NORM = ("Qwen3ForCausalLM",)
_MOST = 1e300
_HEAD_DIM = {"Qwen3ForCausalLM": 128, "GemmaForCausalLM": 256}  # where the config states none


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
    """A model on disk whose header has been read: `path` is a directory, or a file and then `gguf` is its header.

    `config` is its Hugging Face config, or the one that the header describes.
    """

    path: Path
    spec: ModelSpec
    config: Mapping[str, Any]
    gguf: GgufFile | None


def inspect_model(path: Path, runnable: bool = True) -> ModelFiles:
    """Read the shapes of the model at `path`. Raises `ModelError` for what is missing, damaged or unsupported.

    `runnable` is as for `spec_from_config`.
    """
    if path.is_dir():
        gguf, config = None, read_config(path)
    else:
        gguf = read_gguf(path)
        config = config_from_gguf(gguf)
    return ModelFiles(path, spec_from_config(config, str(path), runnable), config, gguf)


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
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is no valid JSON: {error}", "fetch or copy the file again") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds no JSON object", "fetch or copy the file again")
    return config


def spec_from_config(config: Mapping[str, Any], source: str, runnable: bool = True) -> ModelSpec:
    """Validate a Hugging Face config and take its shapes.

    Raises `ModelError`, naming the architecture, for anything that this version would compute wrongly, or without
    `runnable` only for what it would plan wrongly.
    """
    values = _Values(config, source)
    architecture = _architecture(values, runnable)
    quantisation = config.get("quantization_config")
    if quantisation:
        method = quantisation.get("quant_method", "unknown") if isinstance(quantisation, dict) else quantisation
        raise ModelError(
            f"{source} is quantised with {method}, which is not supported yet",
            "use the unquantised safetensors checkpoint or a GGUF file",
        )
    _refuse_rope(values, runnable)
    layers = values.size("num_hidden_layers")
    if _uses_sliding_window(values, architecture, layers, runnable):
        raise ModelError(
            f"{source} has sliding-window layers (window {config.get('sliding_window')}), not supported yet",
            "use a model with full attention in every layer",
        )
    if values.number("rms_norm_eps", 1e-6) < 0:
        raise values.wrong("rms_norm_eps", "a number, at least 0")
    hidden, heads = values.size("hidden_size"), values.size("num_attention_heads")
    kv_heads = values.size("num_key_value_heads", heads)
    head_dim = values.size("head_dim", _HEAD_DIM.get(architecture, hidden // heads))
    if head_dim % 2:
        raise ModelError(
            f"the config of {source} has impossible shapes: heads of {head_dim}, which must be even to be rotated",
            "fetch or copy the model again",
        )
    if heads % kv_heads:
        raise ModelError(
            f"the config of {source} has impossible shapes: {heads}/{kv_heads} heads", "fetch or copy the model again"
        )
    return ModelSpec(
        architecture=architecture,
        layers=layers,
        hidden_size=hidden,
        intermediate_size=values.size("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=values.size("vocab_size"),
        context_window=_window(values.number("max_position_embeddings", 0.0)),
        tied_embeddings=values.flag("tie_word_embeddings", architecture == "GemmaForCausalLM"),
        attention_bias=values.flag("attention_bias"),
        qkv_bias=architecture in _QKV_BIAS,
        mlp_bias=values.flag("mlp_bias"),
        head_norm=architecture in _HEAD_NORM,
    )


def plannable_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config that `spec_from_config` took, without what cannot be run and changes no size.

    That is a rotation whose type is not supported, and a sliding window as long as the longest context.
    """
    planned = dict(config)
    for key in ("rope_parameters", "rope_scaling"):
        if _rope_type(planned.get(key) or {}) not in SUPPORTED_ROPE_TYPES:
            del planned[key]
    if _window_is_whole(planned):
        planned["sliding_window"] = None
    return planned


class _Values:
    """A config whose values are checked as they are read; what is null counts as left out."""

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        self.config, self.source = config, source

    def wrong(self, key: str, allowed: str) -> ModelError:
        """The error for the value of `key`."""
        found = reprlib.repr(self.config[key]) if key in self.config else "nothing"
        return ModelError(
            f"the config of {self.source} has {key}: {found}; it must be {allowed}", "fetch or copy the model again"
        )

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number, at least 1."""
        value = self.config.get(key)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise self.wrong(key, "a whole number, at least 1")
        return value

    def number(self, key: str, default: float) -> float:
        """A finite number."""
        value = self.config.get(key)
        value = default if value is None else value
        if type(value) not in (int, float) or not -_MOST < value < _MOST:  # NaN is neither
            raise self.wrong(key, "a number")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        value = self.config.get(key)
        if value not in (None, False, True):
            raise self.wrong(key, "true or false")
        return default if value is None else bool(value)

    def mapping(self, key: str) -> Mapping[str, Any]:
        """A JSON object, empty where left out."""
        value = self.config.get(key)
        if not isinstance(value, (dict, type(None))):
            raise self.wrong(key, "a JSON object")
        return value or {}

    def texts(self, key: str) -> list[str]:
        """A list of texts, empty where left out."""
        value = self.config.get(key)
        value = [] if value is None else value
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(key, "a list of names")
        return value


def _architecture(values: _Values, runnable: bool) -> str:
    known = SUPPORTED_ARCHITECTURES if runnable else PLANNABLE_ARCHITECTURES
    architecture = (values.texts("architectures") or ["none stated"])[0]
    if architecture not in known:
        raise ModelError(
            f"{values.source} is of architecture {architecture}, which is not supported",
            f"supported are {', '.join(known)}",
        )
    if values.config.get("model_type") != known[architecture]:
        raise values.wrong("model_type", f"{known[architecture]!r} for a {architecture}")
    return architecture


def _window(tokens: float) -> int | None:
    """A stated window; the placeholders for "none" that tokenizers and configs use are not believed."""
    return int(tokens) if 0 < tokens < 1e9 else None


def _refuse_rope(values: _Values, runnable: bool) -> None:
    rope = values.mapping("rope_parameters") or values.mapping("rope_scaling")
    kind = _rope_type(rope)
    if runnable and kind not in SUPPORTED_ROPE_TYPES:
        raise ModelError(
            f"{values.source} uses rope type {kind!r}, which is not supported yet",
            f"supported rope types are {', '.join(SUPPORTED_ROPE_TYPES)}",
        )
    for config in (values, _Values(rope, values.source)):
        if config.number("partial_rotary_factor", 1.0) != 1.0:
            raise config.wrong("partial_rotary_factor", "1: rotating a part of each head is not supported")
        if config.number("rope_theta", 10000.0) <= 0:
            raise config.wrong("rope_theta", "a number above 0")


def _rope_type(rope: Mapping[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))


def _uses_sliding_window(values: _Values, architecture: str, layers: int, runnable: bool) -> bool:
    config, layer_types = values.config, values.texts("layer_types")
    if layer_types:
        if len(layer_types) != layers:
            raise values.wrong("layer_types", f"a list of {layers} names, one for each layer")
        return any(kind != "full_attention" for kind in layer_types)
    switched_off = config.get("use_sliding_window") is False
    # Mistral's config class has a window of 4096 where the file states none.
    default = 4096 if architecture == "MistralForCausalLM" else None
    if switched_off or config.get("sliding_window", default) is None:
        return False
    return runnable or not _window_is_whole(config)


def _window_is_whole(config: Mapping[str, Any]) -> bool:
    """Whether the sliding window holds the longest context, and so is none."""
    window, longest = config.get("sliding_window"), config.get("max_position_embeddings")
    return type(window) is int and type(longest) is int and window >= longest > 0
