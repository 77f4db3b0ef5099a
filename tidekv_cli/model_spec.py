"""The shapes of a model, from `config.json` or a GGUF header. No torch, no weights, no memory formulas but its own.

Which architectures this version drives is decided here, so that others are refused before anything is loaded.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tidekv_cli.architectures import REFUSED, SUPPORTED, release_needed
from tidekv_cli.errors import ModelError
from tidekv_cli.gguf_config import config_from_gguf
from tidekv_cli.gguf_file import GgufFile, read_gguf
from tidekv_cli.quantisation import check_quantisation

_MOST = 1e300
_MOST_LAYERS = 1024
_ALSO = {  # what older configs call it
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "hidden_size": ("n_embd", "d_model"),
    "num_attention_heads": ("n_head", "n_heads"),
    "max_position_embeddings": ("n_positions", "n_ctx", "max_seq_len"),
}


@dataclass(frozen=True, slots=True)
class Traits:
    """What layers ask of attention beside the usual, as far as a config states it and does not leave it to its type.

    `odd` if not every kernel knows it: a `softcap`, chunks, values of another size. `widest_head` is the greatest head
    size of any layer, 0 where none is stated; `windows` are the sizes that sliding layers may have, in tokens.
    """

    softcap: bool = False
    odd: bool = False
    widest_head: int = 0
    windows: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shapes of a decoder-only model; `context_window` in tokens, None where the model states none.

    `traits` are those that the config states.
    """

    architecture: str
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context_window: int | None
    tied_embeddings: bool
    traits: Traits = Traits()


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on disk whose header has been read: `path` is a directory, or a file and then `gguf` is its header.

    `config` is its Hugging Face config, or the one that the header describes.
    """

    path: Path
    spec: ModelSpec
    config: Mapping[str, Any]
    gguf: GgufFile | None = field(repr=False)  # it holds a whole vocabulary


def inspect_model(path: Path, name: str | None = None) -> ModelFiles:
    """Read the shapes of the model at `path`, which messages call `name`.

    Raises `ModelError` for what is missing, damaged or unsupported.
    """
    if path.is_dir():
        gguf, config = None, read_config(path)
    else:
        gguf = read_gguf(path)
        config = config_from_gguf(gguf)
    return ModelFiles(path, spec_from_config(config, name or str(path)), config, gguf)


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


def spec_from_config(config: Mapping[str, Any], source: str) -> ModelSpec:
    """Validate a Hugging Face config and take its shapes.

    Raises `ModelError`, naming the architecture, for anything that this version would compute wrongly.
    """
    values = _Values(config, source)
    architecture = _architecture(values)
    check_quantisation(config, source)
    _check_rotation(values)
    layers = values.size("num_hidden_layers")
    if layers > _MOST_LAYERS:
        raise values.wrong("num_hidden_layers", f"at most {_MOST_LAYERS}")
    if values.flag("use_sliding_window", True):
        values.size("sliding_window", 1)
    values.size("attention_chunk_size", 1)
    layer_types = values.texts("layer_types")
    if layer_types and len(layer_types) != layers:
        raise values.wrong("layer_types", f"a list of {layers} names, one for each layer")
    if values.number("rms_norm_eps", 1e-6) < 0:
        raise values.wrong("rms_norm_eps", "a number, at least 0")
    hidden, heads = values.size("hidden_size"), values.size("num_attention_heads")
    kv_heads = values.size("num_key_value_heads", heads)
    head_dim = values.size("head_dim", hidden // heads)
    if head_dim % 2 or heads % kv_heads:
        raise ModelError(
            f"the config of {source} has impossible shapes: {heads}/{kv_heads} heads of {head_dim}",
            "fetch or copy the model again",
        )
    return ModelSpec(
        architecture=architecture,
        layers=layers,
        hidden_size=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=values.size("vocab_size"),
        context_window=_window(values.number("max_position_embeddings", 0.0)),
        tied_embeddings=values.flag("tie_word_embeddings"),
        traits=traits_of(config),
    )


def traits_of(config: Mapping[str, Any]) -> Traits:
    """The traits that a Hugging Face config states."""
    softcap = bool(config.get("attn_logit_softcapping"))
    chunks = "chunked_attention" in (config.get("layer_types") or ())
    values_differ = config.get("v_head_dim") not in (None, config.get("head_dim"))
    return Traits(
        softcap=softcap,
        odd=softcap or chunks or values_differ,
        widest_head=max(_sizes(config, "head_dim"), default=0),
        windows=tuple(sorted(set(_sizes(config, "window")))),
    )


def _sizes(config: Any, word: str) -> Iterator[int]:
    """Numbers under keys with `word` in them, wherever in a config."""
    if isinstance(config, list):
        for value in config:
            yield from _sizes(value, word)
    elif isinstance(config, dict):
        for key, value in config.items():
            if word in str(key) and type(value) is int and value > 0:
                yield value
            else:
                yield from _sizes(value, word)


def has_experts(config: Mapping[str, Any]) -> bool:
    """Whether a Hugging Face config is that of a mixture of experts, of whose weights a token uses a part."""
    counts = (value for key, value in config.items() if ("expert" in key and "num" in key) or key == "n_routed_experts")
    return any(type(count) is int and count > 1 for count in counts)


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

    def found(self, key: str) -> Any:
        """What the config says under `key`, or under one of its older names."""
        given = (self.config.get(name) for name in (key, *_ALSO.get(key, ())))
        return next((value for value in given if value is not None), None)

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number, at least 1."""
        value = self.found(key)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise self.wrong(key, "a whole number, at least 1")
        return value

    def number(self, key: str, default: float) -> float:
        """A finite number."""
        value = self.found(key)
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


def _architecture(values: _Values) -> str:
    architecture, kind = (values.texts("architectures") or ["none stated"])[0], values.config.get("model_type")
    if not isinstance(kind, str) or SUPPORTED.get(kind) != architecture:
        why = REFUSED.get(kind) if isinstance(kind, str) else None
        if why is None and isinstance(values.config.get("text_config"), dict):
            why = "its config is of several models, one of them for text, and only one for text alone is run"
        known = architecture in SUPPORTED.values()
        raise ModelError(
            f"{values.source} is of architecture {architecture}, model_type {kind}, which is not supported"
            + (f": {why}" if why else ""),
            "its model_type must be that of the architecture"
            if known
            else "docs/architectures.md lists those that are",
        )
    installed = version("transformers")
    needed = release_needed(kind, installed)
    if needed is not None:
        raise ModelError(
            f"{values.source} is of architecture {architecture}, which needs a newer transformers: "
            f"{needed} or later, and {installed} is installed",
            f"pip install 'transformers>={needed}'; its releases from 5.21 on ask for Python 3.11",
        )
    return architecture


def _window(tokens: float) -> int | None:
    """A stated window; the placeholders for "none" that tokenizers and configs use are not believed."""
    return int(tokens) if 0 < tokens < 1e9 else None


def _check_rotation(values: _Values) -> None:
    rope = values.mapping("rope_parameters") or values.mapping("rope_scaling")
    for config in (values, _Values(rope, values.source)):
        if config.number("rope_theta", 10000.0) <= 0:
            raise config.wrong("rope_theta", "a number above 0")
