"""Quantised checkpoints written for a test, and slow, obvious ways to unpack them. Knows nothing of what is tested."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.builders import byte_level_tokenizer

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # a 4-bit float without its sign


def write_checkpoint(path: Path, model: PreTrainedModel, tensors: dict[str, Tensor], method: dict[str, Any]) -> Path:
    """A directory of the model's config, quantised by `method`, with `tensors` as its weights."""
    path.mkdir()
    config = {**model.config.to_dict(), "architectures": [type(model).__name__], "quantization_config": method}
    (path / "config.json").write_text(json.dumps(config, default=str), encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    byte_level_tokenizer().save_pretrained(path)
    return path


def write_fp8(
    path: Path,
    model: PreTrainedModel,
    block: tuple[int, int] | None = (32, 32),
    scale_shape: tuple[int, ...] | None = None,
    static: bool = False,
) -> dict[str, Tensor]:
    """Every matrix of a layer but routers as float8 with a scale for each block, experts one by one.

    A `block` is rows and columns; None is the whole matrix, whose one scale has `scale_shape`. `static` adds a scale
    for each matrix's inputs. Returns the weights that it stands for.
    """
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}

    def pack(name: str, weight: Tensor) -> Tensor:
        rows, columns = weight.shape
        high, wide = block or (rows, columns)
        tiles = weight.reshape(rows // high, high, columns // wide, wide)
        scales = tiles.abs().amax((1, 3)) / 448
        packed = (tiles / scales[:, None, :, None]).to(torch.float8_e4m3fn)
        stored[name] = packed.reshape(rows, columns)
        stored[f"{name}_scale_inv"] = scales if scale_shape is None else scales.reshape(scale_shape)
        if static:
            stored[f"{name.removesuffix('.weight')}.activation_scale"] = torch.tensor(0.5)
        return (packed.float() * scales[:, None, :, None]).reshape(rows, columns)

    for name, weight in model.named_parameters():
        stem = name.rpartition(".")[0]
        if name.endswith("experts.gate_up_proj"):
            halves = [
                [
                    pack(f"{stem}.{index}.{part}_proj.weight", half)
                    for part, half in zip(("gate", "up"), both.chunk(2), strict=True)
                ]
                for index, both in enumerate(weight.detach())
            ]
            meant[name] = torch.stack([torch.cat(both) for both in halves])
        elif name.endswith("experts.down_proj"):
            packed = [pack(f"{stem}.{index}.down_proj.weight", one) for index, one in enumerate(weight.detach())]
            meant[name] = torch.stack(packed)
        elif weight.ndim == 2 and ".layers." in name and not name.endswith("mlp.gate.weight"):
            meant[name] = pack(name, weight.detach())
        else:
            stored[name] = meant[name] = weight.detach().bfloat16()
    scheme = "static" if static else "dynamic"
    method = {"quant_method": "fp8", "weight_block_size": block and list(block), "activation_scheme": scheme}
    write_checkpoint(path, model, stored, {**method, "fmt": "e4m3", "modules_to_not_convert": ["lm_head"]})
    return meant


def write_mxfp4(path: Path, model: PreTrainedModel) -> dict[str, Tensor]:
    """The experts of a GPT-OSS as random 4-bit floats, 32 to a scale; returns the weights that it stands for."""
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    random = torch.Generator().manual_seed(5)
    for name, weight in model.named_parameters():
        stored[name] = meant[name] = weight.detach().bfloat16()
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inner, outer = weight.shape
            blocks = torch.randint(0, 256, (experts, outer, inner // 32, 16), generator=random, dtype=torch.uint8)
            scales = torch.randint(118, 124, (experts, outer, inner // 32), generator=random, dtype=torch.uint8)
            del stored[name]
            stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks, scales
            nibbles = torch.stack([blocks & 15, blocks >> 4], dim=-1).reshape(experts, outer, inner // 32, 32)
            sizes = torch.tensor(_E2M1)[(nibbles & 7).long()] * torch.where(nibbles >= 8, -1.0, 1.0)
            values = sizes * 2.0 ** (scales.float() - 127)[..., None]
            meant[name] = values.reshape(experts, outer, inner).transpose(1, 2)
    write_checkpoint(path, model, stored, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return meant
