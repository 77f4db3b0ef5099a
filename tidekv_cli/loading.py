"""Weights and tokenizer from a resolved source: a Hugging Face directory or a GGUF file.

Safetensors and GGUF only: no pickles, no remote code. Knows no schedule and no plan.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel
from transformers import logging as transformers_logging

from tidekv_cli.checkpoint_files import has_tokenizer, missing_weights, weight_files
from tidekv_cli.errors import ModelError, damage_named
from tidekv_cli.gguf_file import GgufFile
from tidekv_cli.gguf_tokenizer import build_tokenizer
from tidekv_cli.gguf_weights import model_from_gguf
from tidekv_cli.model_spec import ModelFiles

_CPU = torch.device("cpu")
_LAYER = r"\.layers\.(\d+)\."


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, and the token ids at which it ends an answer."""

    model: PreTrainedModel
    end_token_ids: frozenset[int]


def load_tokenizer(files: ModelFiles) -> Any:
    """The model's tokenizer. Raises `ModelError` when it is missing or damaged."""
    path = files.path
    with damage_named(f"the tokenizer in {path} cannot be loaded"):
        if files.gguf is not None:
            return build_tokenizer(files.gguf)
        if not has_tokenizer(path):
            raise ModelError(f"{path} holds no tokenizer (tokenizer.json)", "fetch or copy the whole model directory")
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        if not tokenizer.is_fast:
            raise ModelError(
                f"the tokenizer of {path} is a {type(tokenizer).__name__}, which does not say where its tokens begin",
                "use a model directory with a tokenizer.json",
            )
        return tokenizer


def end_tokens(tokenizer: Any) -> frozenset[int]:
    """Tokens at which an answer ends by the tokenizer: its end token, and what its template puts after an answer."""
    ends = {tokenizer.eos_token_id} - {None}
    answer = "\ue000answer\ue001"
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
    text = ""
    if getattr(tokenizer, "chat_template", None):
        with suppress(Exception):  # a template raises whatever its author chose, and may not know answers
            text = tokenizer.apply_chat_template(turns, tokenize=False)
    rest = text.partition(answer)[2].lstrip()
    special = {str(token): index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    following = max((token for token in special if token and rest.startswith(token)), key=len, default=None)
    return frozenset(ends if following is None else ends | {special[following]})


def load_model(files: ModelFiles, dtype: torch.dtype, device: torch.device = _CPU) -> LoadedModel:
    """Load weights in `dtype` onto `device`, never holding more than them and one tensor as it is stored.

    Raises `ModelError` naming the file that is missing, truncated or of the wrong shape.
    """
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    with damage_named(f"the model in {files.path} cannot be loaded"):
        if files.gguf is None:
            model = _from_directory(files.path, files.spec.architecture, dtype, device)
            ends = [model.config.eos_token_id, _generation_config(files.path).get("eos_token_id")]
        else:
            model = model_from_gguf(files.gguf, dtype, device)
            ends = _gguf_end_tokens(files.gguf)
    model.eval().requires_grad_(False)
    return LoadedModel(model, frozenset(_token_ids(ends, files.path)))


def _token_ids(entries: list[Any], path: Path) -> Iterator[int]:
    """Each config gives no end token, one, or a list of them."""
    for entry in entries:
        for token in entry if isinstance(entry, list) else [] if entry is None else [entry]:
            if type(token) is not int:
                raise ModelError(f"{path} lists the end token {token!r}, which is no token id", "correct its configs")
            yield token


def _generation_config(path: Path) -> dict[str, Any]:
    """Read as plain JSON: transformers fills in and checks much that is not used here."""
    file = path / "generation_config.json"
    if not file.is_file():
        return {}
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} is no valid JSON: {error}", "fetch or copy the file again") from error
    if not isinstance(values, dict):
        raise ModelError(f"{file} holds no JSON object", "fetch or copy the file again")
    return values


def _gguf_end_tokens(file: GgufFile) -> list[int | None]:
    return [file.value(f"tokenizer.ggml.{kind}_token_id", int, None) for kind in ("eos", "eot", "eom")]


def _from_directory(path: Path, architecture: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    with ExitStack() as opened:
        tensors: dict[str, Any] = {}
        for name in _complete(path):
            shard = opened.enter_context(_opened(path / name))
            stored = shard.keys()
            tensors.update((key, shard.get_slice(key)) for key in stored)
        config = _config(path)
        _check_stored(path, tensors, packed=getattr(config, "quantization_config", None) is not None)
        opened.enter_context(_one_tensor_at_a_time())
        model, info = getattr(transformers, architecture).from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            dtype=dtype,
            attn_implementation="eager",  # replaced anyway, and the one that a config names may not be installed
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are told of below
            **({} if device.type == "cpu" else {"device_map": {"": device}}),
        )
    for name, found, wanted in sorted(info["mismatched_keys"]):
        raise ModelError(
            f"{path} holds {name} as {list(found)}, and its config.json asks for {list(wanted)}",
            "fetch or copy the model again; config and weights are of different models",
        )
    lacking = sorted(info["missing_keys"])
    if lacking:
        raise ModelError(
            f"{path} lacks {len(lacking)} tensors, the first is {lacking[0]}",
            "fetch or copy the model again; one of its *.safetensors files is missing or from another model",
        )
    for name in sorted(info["unexpected_keys"]):
        if not _expendable(name, model.config):
            raise ModelError(
                f"{path} holds {name}, which its config.json, with layers 0 to {model.config.num_hidden_layers - 1},"
                " has no place for",
                "fetch or copy the model again; config and weights are of different models",
            )
    return model


def _check_stored(path: Path, tensors: Mapping[str, Any], packed: bool) -> None:
    """Raise `ModelError` for an empty tensor, and for weights in whole numbers that no config tells how to unpack."""
    for name, tensor in tensors.items():
        kind = tensor.get_dtype()
        if 0 in tensor.get_shape():
            raise ModelError(f"{path} holds {name}, which is empty", "fetch or copy the model again")
        if not packed and not kind.startswith(("F", "BF")) and re.search(_LAYER, name) and name.endswith("weight"):
            raise ModelError(
                f"{path} holds {name} as {kind}, and its config.json says nothing of quantisation",
                "use the model's unquantised safetensors, or a GGUF file of it",
            )


def _complete(path: Path) -> list[str]:
    """The files of weights. Raises `ModelError` if one of them is not there."""
    names, lost = weight_files(path), missing_weights(path)
    if lost:
        raise ModelError(
            f"{path} lacks {len(lost)} of its {len(names)} files of weights, the first is {lost[0]}",
            "fetch or copy the missing files",
        )
    return names


def _opened(file: Path) -> Any:
    """A file whose tensors are read one by one into memory of their own: pages of a mapped one would count too."""
    try:
        return safe_open(file, framework="pt", backend="pread")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"the model file {file} is damaged: {error}", "fetch or copy the file again") from error


@contextmanager
def _one_tensor_at_a_time() -> Iterator[None]:
    """Without threads of transformers that read ahead, and so hold a tensor in both types, or experts apart and joined.

    A variable is the only switch that it has.
    """
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _config(path: Path) -> Any:
    config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None:
        config.quantization_config = {**quantised, "dequantize": True}  # else a GPU would have kernels fetched for it
    return config


def _expendable(name: str, config: Any) -> bool:
    """Whether a tensor without a place is none of a layer, or of those that old and new checkpoints carry beside them.

    These are tables of rotary frequencies, and layers that predict further tokens, which follow the last layer.
    """
    match = re.search(_LAYER, name)
    if match is None or name.endswith("inv_freq") or "mtp" in name:
        return True
    predicting = getattr(config, "num_nextn_predict_layers", None) or 0
    return 0 <= int(match[1]) - config.num_hidden_layers < predicting
