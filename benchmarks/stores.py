"""Stores against the dense one: time of a decoding step and bytes. One command, sides interleaved.

    .venv/bin/python benchmarks/stores.py [--rounds 60] [--threads 2] [--model] [--quick]

A step is one layer's new row and its query's attention over a cache that holds as many rows in all; a flat store's
heads hold a third to two times the mean. Times are the least of the rounds. With --model, those of a whole step of the
embedded model, all of its layers, after a prompt of which the budget was kept.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from tidekv_cli.engine.attention import PLAIN
from tidekv_cli.engine.budgets import BudgetPolicy
from tidekv_cli.engine.budgets.ada import AdaHeads
from tidekv_cli.engine.budgets.uniform import EvenHeads, EvenLayers
from tidekv_cli.engine.decode import next_logits
from tidekv_cli.engine.flash_cpu import FlashCPU
from tidekv_cli.engine.prefill import Prefilled, PrefillSettings
from tidekv_cli.engine.selectors import Selection
from tidekv_cli.engine.selectors.snapkv import SnapKV
from tidekv_cli.engine.session import Session
from tidekv_cli.engine.stores import MakeStore, Store
from tidekv_cli.engine.stores.dense import Dense
from tidekv_cli.engine.stores.flat import Flat
from tidekv_cli.engine.stores.quantized import Quantized
from tidekv_cli.loading import load_model, load_tokenizer
from tidekv_cli.model_spec import inspect_model
from tidekv_cli.sources import resolve_model

ROOT = Path(__file__).parent.parent
SHAPES = [(heads, group, size, rows) for heads, group, size in ((3, 3, 64), (8, 4, 128)) for rows in (1024, 2048, 4096)]
FLAT_BAR = 1.25


def least(sides: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Seconds of the fastest call of each side, one after another in every round."""
    seconds = dict.fromkeys(sides, float("inf"))
    for _ in range(rounds):
        for name, side in sides.items():
            began = time.perf_counter()
            side()
            seconds[name] = min(seconds[name], time.perf_counter() - began)
    return seconds


def shared_out(heads: int, total: int) -> tuple[int, ...]:
    """Rows of each head, from a third to five thirds of the mean, in no order."""
    weights = [(3 + 2 * ((5 * head) % heads)) / (2 + heads) for head in range(heads)]
    counts = [int(total * weight / sum(weights)) for weight in weights]
    return (total - sum(counts[1:]), *counts[1:])


def stores(heads: int, size: int, rows: int, slack: int) -> dict[str, Store]:
    """One of each, with `rows` a head on average, of random numbers in float32."""
    draw = torch.Generator().manual_seed(rows)
    length = 2 * rows
    keys, values = torch.randn(2, 1, heads, length, size, generator=draw).unbind()

    def chosen(count: int) -> Tensor:
        return torch.randperm(length, generator=draw)[:count].sort().values

    even = Selection(torch.stack([chosen(rows) for _ in range(heads)]))
    counts = shared_out(heads, heads * rows)
    ragged = Selection(torch.cat([chosen(count) for count in counts]), None, counts)
    made: dict[str, tuple[MakeStore, Selection]] = {
        "dense": (Dense(), even),
        "flat": (Flat(), ragged),
        "quantized": (Quantized(), even),
    }
    return {name: make(keys, values, kept, slack, FlashCPU()) for name, (make, kept) in made.items()}


def of_a_layer(rounds: int) -> None:
    """Print each shape's figures."""
    print(
        f"{'Hkv':>4}{'G':>4}{'D':>5}{'rows':>6}  {'dense us':>9}{'flat/dense':>12}{'quantized/dense':>17}{'bytes':>14}"
    )
    for heads, group, size, rows in SHAPES:
        held = stores(heads, size, rows, rounds + 1)
        queries, new = torch.randn(1, heads * group, 1, size), torch.randn(1, heads, 1, size)

        def step(store: Store, queries: Tensor = queries, new: Tensor = new) -> Callable[[], object]:
            def once() -> None:
                store.append(new, new)
                store.attend(queries, 0.1, PLAIN)

            return once

        seconds = least({name: step(store) for name, store in held.items()}, rounds)
        dense, ratio = seconds["dense"], {name: value / seconds["dense"] for name, value in seconds.items()}
        share = [f"{held[name].nbytes / held['dense'].nbytes:.3f}" for name in ("flat", "quantized")]
        print(
            f"{heads:>4}{group:>4}{size:>5}{rows:>6}  {1e6 * dense:>9.0f}{ratio['flat']:>12.2f}"
            f"{ratio['quantized']:>17.2f}{' '.join(share):>14}"
        )


def of_a_model(rounds: int, tokens: int, budget: int) -> None:
    """Print the same of whole steps of the embedded model."""
    files = inspect_model(resolve_model("smollm2-135m", os.environ, offline=False).path)
    text = "".join((ROOT / "examples" / name).read_text(encoding="utf-8") for name in ("lighthouse.txt", "garden.txt"))
    ids = load_tokenizer(files)(text, add_special_tokens=False, verbose=False)["input_ids"][:tokens]
    session = Session(load_model(files, torch.float32).model, frozenset())
    sides: dict[str, tuple[MakeStore, EvenHeads | AdaHeads]] = {
        "dense": (Dense(), EvenHeads()),
        "flat": (Flat(), AdaHeads()),
        "quantized": (Quantized(), EvenHeads()),
    }

    def step(prompt: Prefilled) -> Callable[[], object]:
        return lambda: next_logits(session.adapter, prompt, [1])

    steps = {}
    for name, (store, heads) in sides.items():
        policy = BudgetPolicy(budget, EvenLayers(), heads)
        settings = PrefillSettings("tide", SnapKV(), policy, FlashCPU(), 512, 1024, rounds + 1, store=store)
        steps[name] = step(session.prefill(ids, settings)[0])
    seconds = least(steps, rounds)
    dense = seconds["dense"]
    print(f"embedded model, {len(ids)} tokens, budget {budget}: dense {1e3 * dense:.1f} ms a step")
    for name in ("flat", "quantized"):
        print(f"  {name} / dense {seconds[name] / dense:.3f}" + (f"  bar {FLAT_BAR}" if name == "flat" else ""))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", action="store_true", help="whole decoding steps of the embedded model too")
    parser.add_argument("--quick", action="store_true", help="two rounds, a short prompt: does it still run?")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rounds = 2 if options.quick else options.rounds
    of_a_layer(rounds)
    if options.model:
        of_a_model(rounds, *((600, 200) if options.quick else (4000, 1024)))


if __name__ == "__main__":
    main()
