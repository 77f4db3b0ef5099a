"""A model from a GGUF file: each tensor unpacked once, under its Hugging Face name. Knows no tokenizer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from accelerate import init_empty_weights
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tidekv_cli.errors import ModelError
from tidekv_cli.gguf_config import config_from_gguf
from tidekv_cli.gguf_file import GgufFile, TensorEntry

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
_VALUES_AT_A_TIME = 1 << 20


def model_from_gguf(file: GgufFile, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The model in `dtype`, its weights made on `device` and filled there piece by piece.

    Raises `ModelError` where a tensor is missing, unknown or of another shape.
    """
    values = config_from_gguf(file)
    config = AutoConfig.for_model(**{"attn_implementation": "eager", **values})
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    entries = {name: entry for entry in file.tensors.values() if (name := _hugging_face_name(entry.name)) is not None}
    # All at first: between what is unpacked and given back, they would leave gaps in the heap.
    state = {name: torch.empty(entry.shape, dtype=dtype, device=device) for name, entry in entries.items()}
    with file.path.open("rb") as stream:
        for name, entry in entries.items():
            _unpack(stream, entry, state[name])
            _unpermute(name, state[name], config)
        factors = file.tensors.get("rope_freqs.weight")
        if factors is not None:
            divisors = torch.empty(factors.shape)
            _unpack(stream, factors, divisors)
            _divide_frequencies(model, divisors, file.path)
    missing, unexpected = _assign(model, state, file.path)
    if missing or unexpected:
        raise ModelError(
            f"{file.path} does not hold the tensors of a Llama model: {(missing + unexpected)[0]} does not match",
            "use a complete GGUF file of a supported model",
        )
    return model.to(device)  # its buffers; the weights are there


def _assign(model: PreTrainedModel, state: dict[str, torch.Tensor], path: Path) -> tuple[list[str], list[str]]:
    try:
        result = model.load_state_dict(state, assign=True, strict=False)
    except RuntimeError as error:
        raise ModelError(f"a tensor in {path} has the wrong shape: {error}", "use a complete GGUF file") from error
    model.tie_weights()
    missing = [name for name, _ in model.named_parameters() if name not in state]
    return missing, list(result.unexpected_keys)


def _hugging_face_name(name: str) -> str | None:
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?([a-z_]+)\.(weight|bias)", name)
    if match is None or match[2] not in _GGUF_NAMES:
        return None if name == "rope_freqs.weight" else name
    prefix = f"model.layers.{match[1]}." if match[1] else ""
    return f"{prefix}{_GGUF_NAMES[match[2]]}.{match[3]}"


def _unpack(stream: BinaryIO, entry: TensorEntry, out: torch.Tensor) -> None:
    """One tensor into `out` of its shape; blocks are read and unpacked to float32 a bounded number at a time."""
    kind = GGMLQuantizationType(entry.type_id)
    codec: Any = None if kind in _PLAIN else getattr(quants, kind.name, None)
    if codec is None and kind not in _PLAIN:
        raise ModelError(
            f"tensor {entry.name!r} is stored as {kind.name}, which cannot be unpacked",
            "use another quantisation",
        )
    if hasattr(codec, "init_grid"):
        codec.init_grid()
    block, block_bytes = GGML_QUANT_SIZES[kind]
    rows = out.view(-1, block)
    # Not mapped: pages that were read would count as the process's own.
    stream.seek(entry.start)
    for piece in rows.split(max(_VALUES_AT_A_TIME // block, 1)):
        packed = np.fromfile(stream, np.uint8, len(piece) * block_bytes).reshape(-1, block_bytes)
        values = packed.view(_PLAIN[kind]) if codec is None else codec.dequantize_blocks(packed)
        piece.copy_(torch.from_numpy(values.reshape(-1, block)))


def _unpermute(name: str, weight: torch.Tensor, config: Any) -> None:
    """Undo the row order in which GGUF keeps the rotary halves of Q and K: pairs side by side, not half by half."""
    part = name.rpartition(".")[0].rpartition(".")[2]
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(part)
    if heads is None or weight.shape[0] % (2 * heads):  # of a wrong shape, which is found when it is assigned
        return
    pairs = weight.view(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    weight.copy_(pairs.transpose(1, 2).reshape(weight.shape))


def _divide_frequencies(model: PreTrainedModel, factors: torch.Tensor, path: Path) -> None:
    """Llama 3.1's rope scaling, which GGUF files carry as one divisor per frequency."""
    rotary = model.model.rotary_emb
    if factors.shape != rotary.inv_freq.shape or not bool((factors > 0).all()):
        raise ModelError(
            f"rope_freqs.weight in {path} is not {len(rotary.inv_freq)} numbers above 0", "use a complete GGUF file"
        )
    rotary.inv_freq.div_(factors)
    rotary.original_inv_freq.div_(factors)
