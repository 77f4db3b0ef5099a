"""What loading takes at its highest: the weights, and little beside them, however they are stored."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from safetensors.torch import save_file
from transformers import LlamaConfig

from tests.builders import (
    gguf_name,
    llama_metadata,
    tiny_causal_model,
    write_gguf,
    write_hugging_face,
    write_llama_gguf,
)

KIND = GGMLQuantizationType
LAYERS, HIDDEN, INNER, VOCAB = 12, 1024, 2560, 4096
LOADING = """
import sys, torch
from pathlib import Path
from tidekv_cli.loading import load_model
from tidekv_cli.model_spec import inspect_model

model = load_model(inspect_model(Path(sys.argv[1])), getattr(torch, sys.argv[2])).model
for weight in model.parameters():
    weight.sum()
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(int(peak.split()[1]) * 1024, sum(weight.nbytes for weight in model.parameters()))
"""


def config(tied: bool) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=16,
        num_key_value_heads=16,
        head_dim=64,
        rms_norm_eps=2.0**-17,
        max_position_embeddings=4096,
        tie_word_embeddings=tied,
        architectures=["LlamaForCausalLM"],
    )


def shapes(tied: bool) -> dict[str, tuple[int, ...]]:
    """Of every tensor, by name."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        start = f"model.layers.{layer}."
        found |= {f"{start}self_attn.{part}_proj.weight": (HIDDEN, HIDDEN) for part in "qkvo"}
        found |= {f"{start}mlp.{part}_proj.weight": (INNER, HIDDEN) for part in ("gate", "up")}
        found[f"{start}mlp.down_proj.weight"] = (HIDDEN, INNER)
        found |= {f"{start}{part}_layernorm.weight": (HIDDEN,) for part in ("input", "post_attention")}
    found["model.norm.weight"] = (HIDDEN,)
    return found if tied else {**found, "lm_head.weight": (VOCAB, HIDDEN)}


def write_shards(path: Path, dtype: torch.dtype, tied: bool, shards: int = 5) -> Path:
    """About 150 million random weights."""
    config(tied).save_pretrained(path)
    names = list(shapes(tied))
    pieces = [names[start::shards] for start in range(shards)]
    index: dict[str, str] = {}
    for number, piece in enumerate(pieces):
        file = f"model-{number:05d}.safetensors"
        save_file({name: torch.randn(shapes(tied)[name], dtype=dtype) for name in piece}, path / file)
        index |= dict.fromkeys(piece, file)
    lines = ", ".join(f'"{name}": "{file}"' for name, file in index.items())
    (path / "model.safetensors.index.json").write_text(f'{{"weight_map": {{{lines}}}}}', encoding="utf-8")
    return path


def write_quantised_gguf(path: Path) -> Path:
    random = np.random.default_rng(0)
    tensors = {}
    for name, shape in shapes(tied=False).items():
        block, block_bytes = GGML_QUANT_SIZES[KIND.Q8_0]
        if len(shape) == 1:
            tensors[gguf_name(name)] = (np.ones(shape, np.float32), KIND.F32)
            continue
        blocks = random.integers(0, 100, (math.prod(shape) // block, block_bytes), dtype=np.uint8)
        blocks[:, :2] = np.full(1, 0.001, np.float16).view(np.uint8)
        tensors[gguf_name(name)] = (blocks.reshape(shape[0], -1), KIND.Q8_0)
    return write_gguf(path, llama_metadata(config(tied=False)), tensors)


def growth(path: Path, dtype: str, baseline: int) -> float:
    """Peak of a fresh process that loads `path`, less the baseline, over its weights."""
    peak, weights = measured(path, dtype)
    return (peak - baseline) / weights


def measured(path: Path, dtype: str) -> tuple[int, int]:
    done = subprocess.run([sys.executable, "-c", LOADING, str(path), dtype], capture_output=True, text=True, check=True)
    peak, weights = map(int, done.stdout.split())
    return peak, weights


@pytest.fixture(scope="module")
def baselines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Peaks of processes that load next to nothing."""
    path = tmp_path_factory.mktemp("tiny")
    directory = write_hugging_face(path / "model", tiny_causal_model())
    file = write_llama_gguf(path / "model.gguf", tiny_causal_model())
    return {"directory": measured(directory, "float32")[0], "gguf": measured(file, "float32")[0]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stored", "wanted", "tied"),
    [
        (torch.bfloat16, "bfloat16", False),
        (torch.bfloat16, "float32", True),
        (torch.float32, "float32", False),
        (torch.float32, "bfloat16", True),
    ],
)
def test_a_directory_takes_its_weights(
    tmp_path: Path, baselines: dict[str, int], stored: torch.dtype, wanted: str, tied: bool
) -> None:
    path = write_shards(tmp_path / "model", stored, tied)
    assert growth(path, wanted, baselines["directory"]) < 1.15


@pytest.mark.slow
@pytest.mark.parametrize("wanted", ["bfloat16", "float32"])
def test_a_gguf_file_takes_its_weights(tmp_path: Path, baselines: dict[str, int], wanted: str) -> None:
    path = write_quantised_gguf(tmp_path / "model.gguf")
    assert growth(path, wanted, baselines["gguf"]) < 1.15
