"""Every method on the embedded model: what it takes while the cache is built, and what stays.

    python benchmarks/methods.py            the table, also in docs/methods.md
    python benchmarks/methods.py --methods tidekv-snapkv,snapkv --tokens 1024 --rounds 1

All run on the same weights, prompt, precision, budget, chunk size and meter, in this process one after another. Bytes
are those of live tensors; the transient peak is the highest moment of the prefill less the weights. Every method is run
in every round, and the time of the prefill is the least of them.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tidekv_cli.methods import METHODS
from tidekv_cli.model import Model
from tidekv_cli.request import RunRequest

PAGE = Path(__file__).parent.parent / "docs" / "methods.md"
BEGIN, END = "<!-- measured by benchmarks/methods.py -->", "<!-- end -->"


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one method: MiB of live tensors beside the weights, and the seconds of its prefill."""

    peak: float
    planned: float
    cache: float
    seconds: float


def measured(name: str, tokens: int, budget: int, chunk: int) -> Measured:
    """One run."""
    budgeted = METHODS[name].selector_info.budgeted
    request = RunRequest(
        method=name,
        budget=str(budget) if budgeted else None,
        chunk_size=chunk,
        dtype="float32",
        device="cpu",
        max_new_tokens=16,
    )
    model = Model(request, os.environ)
    vocabulary = model.files.spec.vocab_size
    ids = torch.randint(vocabulary, (tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    run = model.plan_tokens(ids, allow_beyond_window=True)
    run.prefill()
    outcome = run.outcome
    assert outcome.live_peak_bytes is not None and outcome.cache_bytes is not None
    planned = run.plan.bytes.live - run.plan.bytes.weights
    peak = outcome.live_peak_bytes - run.plan.bytes.weights
    list(run.tokens())
    assert outcome.prefill_s is not None
    return Measured(peak / 2**20, planned / 2**20, outcome.cache_bytes / 2**20, outcome.prefill_s)


def table(found: dict[str, Measured], tokens: int, budget: int, chunk: int) -> str:
    """In Markdown, with what it was measured on."""
    head = ("method", "schedule × selector × policy × store", "transient peak", "planned", "final cache", "prefill, s")
    rows = [
        (
            f"`{name}`",
            " × ".join(METHODS[name].axes),
            *(f"{value:.1f}" for value in (one.peak, one.planned, one.cache)),
            f"{one.seconds:.2f}",
        )
        for name, one in found.items()
    ]
    lines = [
        f"{datetime.date.today().isoformat()}, `smollm2-135m` in float32 on a CPU ({platform.machine()},"
        f" {os.cpu_count()} cores, torch {torch.__version__}), {tokens:,} random tokens, K={budget}, C={chunk}, 16 new"
        " tokens; MiB of live tensors, without the weights:",
        "",
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    names = arguments.methods.split(",")
    unknown = [name for name in names if name not in METHODS]
    if unknown:
        parser.error(f"there is no method {', '.join(unknown)}")
    found: dict[str, Measured] = {}
    for round_number in range(arguments.rounds):
        for name in names:
            one = measured(name, arguments.tokens, arguments.budget, arguments.chunk)
            seconds = min(one.seconds, found[name].seconds) if name in found else one.seconds
            found[name] = replace(one, seconds=seconds)
            print(f"round {round_number + 1}, {name}: {one.seconds:.2f} s", file=sys.stderr, flush=True)
    text = table(found, arguments.tokens, arguments.budget, arguments.chunk)
    print(text)
    if names == list(METHODS) and all(getattr(arguments, key) == parser.get_default(key) for key in vars(arguments)):
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
