"""What loading takes: the peak of a fresh process that loads a large sharded checkpoint, over its weights.

    .venv/bin/python benchmarks/loading.py [--gigabytes 1.5] [--shards 5] [--stored bfloat16] [--dtype bfloat16]

The checkpoint is random and made in a temporary directory. The growth is the peak less that of a process that loads
next to nothing: the libraries themselves. Prints one JSON document.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from transformers import LlamaConfig

from tidekv_cli.device import detect_device
from tidekv_cli.loading import load_model
from tidekv_cli.model_spec import inspect_model

HIDDEN, INNER, VOCAB = 2048, 5632, 32000
BAR = 1.15


def shape(layers: int, hidden: int = HIDDEN, inner: int = INNER, vocab: int = VOCAB) -> LlamaConfig:
    """A Llama with a head of its own."""
    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    )


def layers_for(nbytes: float, dtype: torch.dtype) -> int:
    """So many that the weights take at least `nbytes`."""
    layer = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER
    return max(-(-int(nbytes / dtype.itemsize - 2 * VOCAB * HIDDEN) // layer), 1)


def write_checkpoint(path: Path, config: LlamaConfig, dtype: torch.dtype, shards: int) -> int:
    """Random weights in `shards` files, one file in memory at a time; returns their bytes."""
    config.save_pretrained(path)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    shapes = {name: weight.shape for name, weight in model.named_parameters()}
    index: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        names = list(shapes)[number::shards]
        save_file({name: torch.randn(shapes[name], dtype=dtype) for name in names}, path / file)
        index |= dict.fromkeys(names, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}), encoding="utf-8")
    return sum(size.numel() for size in shapes.values()) * dtype.itemsize


def peak_of_loading(path: Path, dtype: str) -> tuple[int, int]:
    """Bytes of this process at its highest, every weight touched, and those of the weights."""
    model = load_model(inspect_model(path), getattr(torch, dtype)).model
    weights = sum(weight.nbytes for weight in model.parameters())
    for weight in model.parameters():
        weight.sum()
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    peak = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    return peak, weights


def in_fresh_process(path: Path, dtype: str) -> tuple[int, int]:
    """The same of a process of its own."""
    command = [sys.executable, __file__, "--load", str(path), "--dtype", dtype]
    peak, weights = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return peak, weights


def main() -> None:
    """Make the checkpoint, load it, print."""
    types = ("bfloat16", "float16", "float32")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.5, help="of weights as they are stored")
    parser.add_argument("--shards", type=int, default=5)
    parser.add_argument("--stored", choices=types, default="bfloat16")
    parser.add_argument("--dtype", choices=types, default="bfloat16", help="in which they are loaded")
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        print(json.dumps(peak_of_loading(options.load, options.dtype)))
        return
    stored = getattr(torch, options.stored)
    with tempfile.TemporaryDirectory(prefix="tidekv-loading-") as scratch:
        tiny, large = Path(scratch, "tiny"), Path(scratch, "large")
        write_checkpoint(tiny, shape(1, hidden=64, inner=64, vocab=64), stored, 1)
        nbytes = write_checkpoint(large, shape(layers_for(options.gigabytes * 1e9, stored)), stored, options.shards)
        baseline, _ = in_fresh_process(tiny, options.dtype)
        peak, weights = in_fresh_process(large, options.dtype)
    figures = {
        "date": datetime.date.today().isoformat(),
        "machine": detect_device("cpu").name,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "stored": options.stored,
        "dtype": options.dtype,
        "shards": options.shards,
        "stored_bytes": nbytes,
        "weights_bytes": weights,
        "baseline_bytes": baseline,
        "process_peak_bytes": peak,
        "process_peak_over_weights": round(peak / weights, 3),
        "growth_over_weights": round((peak - baseline) / weights, 3),
        "bar": BAR,
    }
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
