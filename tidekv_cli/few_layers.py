"""A model on fake tensors with few of its layers, which stand for all. Knows no engine."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from threading import RLock
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tidekv_cli.architectures import MOVING_ROTATIONS
from tidekv_cli.engine.adapter import find_layers
from tidekv_cli.errors import ModelError, damage_named

_FAKE = FakeTensorMode()
_ONE_AT_A_TIME = RLock()  # fake tensors know their mode, and a mode only one thread
_FAULT_LOG = logging.getLogger("torch._subclasses.fake_tensor")  # what torch says of a fault before it raises it
_ANY_WINDOW = 1 << 20  # changes no size
_ROTATIONS = ("rope_parameters", "rope_scaling")
_PLAIN_ROTATIONS = ("default", "linear", "llama3", "yarn")
_OTHER_ROTATIONS = (*MOVING_ROTATIONS, "proportional")


@dataclass(frozen=True, slots=True)
class FewLayers:
    """`model` has the layers `kept` of the whole one: the first, the last, and between them the last of each kind.

    `stand_ins` says for every layer of the whole model which place in `kept` is of its kind; `weight_bytes` are the
    whole model's, and so is `config`, with what was left to its type's defaults.
    """

    model: PreTrainedModel
    kept: tuple[int, ...]
    stand_ins: tuple[int, ...]
    weight_bytes: int
    config: Mapping[str, Any]


@contextmanager
def fake_tensors(config: Mapping[str, Any]) -> Iterator[None]:
    """Tensors of a model of `config` have shapes and no memory in here. Raises `ModelError` where it cannot be run."""
    what = f"the config of the {config.get('model_type')} model describes none that can be run"
    disabled = _FAULT_LOG.disabled
    with (
        _ONE_AT_A_TIME,
        _FAKE,
        torch.device("cpu"),
        torch.no_grad(),
        damage_named(what),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # of shapes that the plan tells of, or the damage
        _FAULT_LOG.disabled = True
        try:
            yield
        finally:
            _FAULT_LOG.disabled = disabled


@lru_cache(maxsize=4)
def few_layers(config: str, window: int | None, dtype: torch.dtype) -> FewLayers:
    """Of the model of a Hugging Face `config`, as JSON. Raises `ModelError` where none can be built from it."""
    with fake_tensors(json.loads(config)):
        model = _whole_model(json.loads(config), window, dtype)
        layers = find_layers(model)
        count = len(layers)
        kinds = [_kind(layer, model.config, index, count) for index, layer in enumerate(layers)]
        last_of_kind = {kind: index for index, kind in enumerate(kinds) if 0 < index < count - 1}
        kept = tuple(sorted({0, count - 1, *last_of_kind.values()}))
        stand_ins = tuple(kept.index(last_of_kind.get(kind, index)) for index, kind in enumerate(kinds))
        weight_bytes = sum(weight.numel() * weight.element_size() for weight in model.parameters())
        complete = model.config.to_dict()
        _keep(model, layers, kept)
    return FewLayers(model, kept, stand_ins, weight_bytes, complete)


def _whole_model(values: dict[str, Any], window: int | None, dtype: torch.dtype) -> PreTrainedModel:
    for key in ("_attn_implementation", "torch_dtype", "dtype", "quantization_config"):  # weights are unpacked
        values.pop(key, None)
    for key in _ROTATIONS:
        if not _plain(values.get(key)):  # others look at the values of positions, and take no more memory
            del values[key]
    values |= {"attn_implementation": "eager", "max_position_embeddings": window or _ANY_WINDOW}
    config = AutoConfig.for_model(**values)
    heads, kv_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    if type(kv_heads) is int and (kv_heads < 1 or heads % kv_heads):
        raise ValueError(f"{heads} attention heads cannot share {kv_heads} key-value heads")
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def _plain(rotation: Any) -> bool:
    """Whether every rotation in it, of which there may be one a type of layer, is of a plain type."""
    if not isinstance(rotation, Mapping):
        return True
    kind = rotation.get("rope_type", rotation.get("type", "default"))
    if kind not in (*_PLAIN_ROTATIONS, *_OTHER_ROTATIONS):
        raise ModelError(
            f"the rotation of the model's positions is of type {kind}, which is not known",
            f"those that are known are {', '.join((*_PLAIN_ROTATIONS, *_OTHER_ROTATIONS))}",
        )
    return kind in _PLAIN_ROTATIONS and all(_plain(inner) for inner in rotation.values())


def _kind(layer: nn.Module, config: Any, index: int, count: int) -> Hashable:
    """Equal for layers that take the same memory: classes, weights, settings, and what the config lists for each."""
    weights = tuple((name, tuple(weight.shape)) for name, weight in layer.named_parameters())
    settings = tuple(
        (name, key, value)
        for name, module in layer.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, (int, float, str, type(None))) and not key.startswith("_") and key != "layer_idx"
    )
    listed = tuple((key, repr(value[index])) for key, value in _lists(config, count).items())
    return type(layer).__name__, weights, settings, listed


def _lists(config: Any, count: int) -> dict[str, list[Any]]:
    """What `config` says of each layer by itself."""
    return {key: value for key, value in vars(config).items() if isinstance(value, list) and len(value) == count}


def _keep(model: PreTrainedModel, layers: nn.ModuleList, kept: tuple[int, ...]) -> None:
    """Leave only those layers, and tell config and layers so."""
    config, count = model.config, len(layers)
    for key, value in _lists(config, count).items():
        setattr(config, key, [value[index] for index in kept])
    config.num_hidden_layers = len(kept)
    few = nn.ModuleList(layers[index] for index in kept)
    for place, layer in enumerate(few):
        for module in layer.modules():
            if "layer_idx" in vars(module):
                vars(module)["layer_idx"] = place
    owners = [(owner, name) for owner in model.modules() for name, child in owner.named_children() if child is layers]
    for owner, name in owners:
        setattr(owner, name, few)
