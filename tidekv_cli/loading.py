"""Weights and tokenizer from a resolved source: a Hugging Face directory or a GGUF file.

Safetensors and GGUF only: no pickles, no remote code. Knows no schedule and no plan.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import init_empty_weights
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers import logging as transformers_logging

from tidekv_cli.errors import ModelError
from tidekv_cli.gguf_file import GgufFile, TensorEntry
from tidekv_cli.gguf_tokenizer import build_tokenizer
from tidekv_cli.model_spec import ModelFiles, config_from_gguf

_GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_PLAIN = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}
_BLOCKS_AT_A_TIME = 1 << 16


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, and the token ids at which it ends an answer."""

    model: PreTrainedModel
    end_token_ids: frozenset[int]


def load_tokenizer(files: ModelFiles) -> Any:
    """The model's tokenizer. Raises `ModelError` when it is missing or damaged."""
    if files.gguf is not None:
        return build_tokenizer(files.gguf)
    path = files.path
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise ModelError(f"{path} holds no tokenizer (tokenizer.json)", "fetch or copy the whole model directory")
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the libraries below raise a dozen kinds for one damaged file
        raise ModelError(f"the tokenizer in {path} cannot be read: {error}", "fetch or copy it again") from error


def load_model(files: ModelFiles, dtype: torch.dtype) -> LoadedModel:
    """Load weights in `dtype` on the CPU.

    Raises `ModelError` naming the file that is missing, truncated or of the wrong shape.
    """
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    model = _from_directory(files.path, dtype) if files.gguf is None else _from_gguf(files.gguf, dtype)
    model.eval().requires_grad_(False)
    return LoadedModel(model, _end_tokens(model, files))


def _end_tokens(model: PreTrainedModel, files: ModelFiles) -> frozenset[int]:
    """Every end token that the generation config and the model config list."""
    listed: list[Any] = [getattr(model.config, "eos_token_id", None)]
    if files.gguf is not None:
        listed.extend(_gguf_end_tokens(files.gguf))
    elif (files.path / "generation_config.json").is_file():
        listed.append(GenerationConfig.from_pretrained(files.path, local_files_only=True).eos_token_id)
    ids: set[int] = set()
    for entry in listed:
        ids.update(entry if isinstance(entry, (list, tuple)) else [] if entry is None else [entry])
    return frozenset(ids)


def _gguf_end_tokens(file: GgufFile) -> list[int]:
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    return [file.metadata[key] for key in keys if key in file.metadata]


def _from_directory(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    weights = sorted(path.glob("*.safetensors"))
    if not weights:
        pickled = sorted(path.glob("*.bin")) + sorted(path.glob("*.pt"))
        found = f"only {pickled[0].name}, a pickle that can run code" if pickled else "no weights"
        raise ModelError(f"{path} holds {found}", "only *.safetensors and .gguf files are loaded; convert the model")
    for file in weights:
        _check_safetensors(file)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:
        raise ModelError(f"the weights in {path} cannot be loaded: {error}", "fetch or copy the model again") from error
    lacking = sorted(info["missing_keys"])
    if lacking or info["mismatched_keys"]:
        names = lacking or sorted(str(key) for key in info["mismatched_keys"])
        raise ModelError(
            f"{path} lacks {len(names)} tensors or has them in another shape, the first is {names[0]}",
            "fetch or copy the model again; one of its *.safetensors files is missing or from another model",
        )
    return model


def _check_safetensors(file: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        raise ModelError(f"the model file {file} is damaged: {error}", "fetch or copy the file again") from error


def _from_gguf(file: GgufFile, dtype: torch.dtype) -> PreTrainedModel:
    values = config_from_gguf(file)
    config = AutoConfig.for_model(**{"attn_implementation": "eager", **values})
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    state: dict[str, torch.Tensor] = {}
    with file.path.open("rb") as stream:
        blob = np.asarray(np.memmap(stream, dtype=np.uint8, mode="r"))
        for entry in file.tensors.values():
            name = _hugging_face_name(entry.name)
            if name is not None:
                state[name] = _unpermuted(entry.name, _dequantised(blob, entry, dtype), config)
        factors = file.tensors.get("rope_freqs.weight")
        if factors is not None:
            _divide_frequencies(model, _dequantised(blob, factors, torch.float32))
        del blob
    missing, unexpected = _assign(model, state, file.path)
    if missing or unexpected:
        raise ModelError(
            f"{file.path} does not hold the tensors of a Llama model: {(missing + unexpected)[0]} does not match",
            "use a complete GGUF file of a supported model",
        )
    return model


def _assign(model: PreTrainedModel, state: dict[str, torch.Tensor], path: Path) -> tuple[list[str], list[str]]:
    try:
        result = model.load_state_dict(state, assign=True, strict=False)
    except RuntimeError as error:
        raise ModelError(f"a tensor in {path} has the wrong shape: {error}", "use a complete GGUF file") from error
    model.tie_weights()
    missing = [name for name, weight in model.named_parameters() if weight.is_meta]
    return missing, list(result.unexpected_keys)


def _hugging_face_name(name: str) -> str | None:
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?([a-z_]+)\.(weight|bias)", name)
    if match is None or match[2] not in _GGUF_NAMES:
        return None if name == "rope_freqs.weight" else name
    prefix = f"model.layers.{match[1]}." if match[1] else ""
    return f"{prefix}{_GGUF_NAMES[match[2]]}.{match[3]}"


def _dequantised(blob: np.ndarray[Any, Any], entry: TensorEntry, dtype: torch.dtype) -> torch.Tensor:
    """One tensor in `dtype`, `entry.shape`; blocks are unpacked in float32, a bounded number at a time."""
    kind = GGMLQuantizationType(entry.type_id)
    packed = blob[entry.start : entry.start + entry.nbytes]
    if kind in _PLAIN:
        return torch.from_numpy(packed.view(_PLAIN[kind]).reshape(entry.shape).astype(np.float32)).to(dtype)
    codec = getattr(quants, kind.name, None)
    if codec is None:
        raise ModelError(
            f"tensor {entry.name!r} is stored as {kind.name}, which cannot be unpacked",
            "use another quantisation",
        )
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if hasattr(codec, "init_grid"):
        codec.init_grid()
    blocks = packed.reshape(-1, block_bytes)
    out = torch.empty(len(blocks), block, dtype=dtype)
    for first in range(0, len(blocks), _BLOCKS_AT_A_TIME):
        piece = codec.dequantize_blocks(blocks[first : first + _BLOCKS_AT_A_TIME])
        out[first : first + len(piece)] = torch.from_numpy(piece.reshape(-1, block))
    return out.view(entry.shape)


def _unpermuted(name: str, weight: torch.Tensor, config: Any) -> torch.Tensor:
    """Undo the row order in which GGUF keeps the rotary halves of Q and K: pairs side by side, not half by half."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return weight
    pairs = weight.view(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)


def _divide_frequencies(model: PreTrainedModel, factors: torch.Tensor) -> None:
    """Llama 3.1's rope scaling, which GGUF files carry as one divisor per frequency."""
    rotary = model.model.rotary_emb
    rotary.inv_freq.div_(factors)
    rotary.original_inv_freq.div_(factors)
