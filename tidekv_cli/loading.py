"""Weights and tokenizer from a resolved source: a Hugging Face directory or a GGUF file.

Safetensors and GGUF only: no pickles, no remote code. Knows no schedule and no plan.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers import logging as transformers_logging

from tidekv_cli.errors import ModelError, damage_named
from tidekv_cli.gguf_file import GgufFile
from tidekv_cli.gguf_tokenizer import build_tokenizer
from tidekv_cli.gguf_weights import model_from_gguf
from tidekv_cli.model_spec import ModelFiles
from tidekv_cli.sources import TOKENIZER_FILES

_CPU = torch.device("cpu")


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
        if not any((path / name).is_file() for name in TOKENIZER_FILES):
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
    """Load weights in `dtype` onto `device`.

    Raises `ModelError` naming the file that is missing, truncated or of the wrong shape.
    """
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    with damage_named(f"the model in {files.path} cannot be loaded"):
        if files.gguf is None:
            model = _from_directory(files.path, dtype, device)
            ends = [model.config.eos_token_id, _generation_config(files.path).get("eos_token_id")]
        else:
            model = model_from_gguf(files.gguf, dtype).to(device)
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


def _from_directory(path: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    weights = sorted(path.glob("*.safetensors"))
    if not weights:
        pickled = sorted(path.glob("*.bin")) + sorted(path.glob("*.pt"))
        found = f"only {pickled[0].name}, a pickle that can run code" if pickled else "no weights"
        raise ModelError(f"{path} holds {found}", "only *.safetensors and .gguf files are loaded; convert the model")
    for file in weights:
        _check_safetensors(file)
    model, info = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=dtype,
        local_files_only=True,
        use_safetensors=True,
        trust_remote_code=False,
        output_loading_info=True,
        **({} if device.type == "cpu" else {"device_map": {"": device}}),
    )
    lacking = sorted(info["missing_keys"])
    if lacking or info["mismatched_keys"]:
        names = lacking or sorted(str(key) for key in info["mismatched_keys"])
        raise ModelError(
            f"{path} lacks {len(names)} tensors or has them in another shape, the first is {names[0]}",
            "fetch or copy the model again; one of its *.safetensors files is missing or from another model",
        )
    layers = f"0 to {model.config.num_hidden_layers - 1}"
    for name in sorted(info["unexpected_keys"]):
        if ".layers." in name and not name.endswith("inv_freq"):  # an old checkpoint's table of frequencies
            raise ModelError(
                f"{path} holds {name}, which its config.json, with layers {layers}, has no place for",
                "fetch or copy the model again; config and weights are of different models",
            )
    return model


def _check_safetensors(file: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        raise ModelError(f"the model file {file} is damaged: {error}", "fetch or copy the file again") from error
