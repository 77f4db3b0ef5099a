"""Which files of a Hugging Face directory hold the weights and the tokenizer. Opens none of the weights; no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tidekv_cli.errors import ModelError

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_ONLY = "only safetensors and .gguf files are loaded; "


def has_tokenizer(directory: Path) -> bool:
    """Whether there is a tokenizer, or a part of one."""
    return any((directory / name).is_file() for name in _TOKENIZER_FILES)


def weight_files(directory: Path) -> list[str]:
    """Names of the files that hold the weights, be they there or not: `model.safetensors`, or all that the index lists.

    Raises `ModelError` where there is neither, naming what there is instead, or where the index is damaged.
    """
    if (directory / SINGLE).is_file():
        return [SINGLE]
    index = directory / INDEX
    if not index.is_file():
        raise without_weights(str(directory), (path.name for path in directory.iterdir()))
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ModelError(f"{index} is no index of weights: {error!r}", "fetch or copy the file again") from error
    for name in names:
        if not isinstance(name, str) or not name or Path(name).name != name:
            raise ModelError(f"{index} names {name!r}, which is no file beside it", "fetch or copy the file again")
    return names


def missing_weights(directory: Path) -> list[str]:
    """Those of `weight_files` that are not there. Raises `ModelError` as it does."""
    return [name for name in weight_files(directory) if not (directory / name).is_file()]


def without_weights(place: str, names: Iterable[str]) -> ModelError:
    """The error for a directory or repository with the files `names`, none of them weights that are loaded."""
    listed = sorted(names)
    for name in listed:
        if name.endswith(_PICKLES):
            return ModelError(
                f"{place} holds only {name}, a pickle that can run code",
                _ONLY + "look for a repository of the same model with *.safetensors, or convert it",
            )
    for name in listed:
        if name.endswith(".gguf"):
            return ModelError(
                f"{place} holds {name} and no safetensors", f"download {name} and give its path as the model"
            )
    for name in listed:
        if name.endswith(".safetensors"):
            return ModelError(
                f"{place} holds {name}, but neither {SINGLE} nor {INDEX}", "fetch or copy the model's other files too"
            )
    return ModelError(f"{place} holds no weights", _ONLY + "give a model that has them")
