"""TideKV against its baselines on the embedded model: time, memory, decode rate. One command, sides interleaved.

    .venv/bin/python benchmarks/prefill.py [--tokens 7500] [--rounds 3] [--json FILE] [--quick]

Times are the least of the rounds, a share is that of the fastest. Live memory is counted by tensor. Process growth is
read in fresh processes, whose C library returns what is freed (MALLOC_MMAP_THRESHOLD_), else memory that loading
left free would be used again unseen; a short prompt before it brings code and libraries in.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from tidekv_cli.device import detect_device
from tidekv_cli.engine.budgets.uniform import uniform
from tidekv_cli.engine.flash_cpu import FlashCPU
from tidekv_cli.engine.meter import LiveMeter
from tidekv_cli.engine.prefill import LayerMajorPrefill, Prefilled, PrefillSettings
from tidekv_cli.engine.sampling import SamplingSettings
from tidekv_cli.engine.selectors.snapkv import SnapKV
from tidekv_cli.engine.session import Session
from tidekv_cli.loading import LoadedModel, load_model, load_tokenizer
from tidekv_cli.model_spec import inspect_model
from tidekv_cli.profile import find_profile
from tidekv_cli.sources import resolve_model

ROOT = Path(__file__).parent.parent
MIB = 1 << 20
NEW_TOKENS = 33  # the first is not counted
TIMED_CHUNKS = (512, 1024, 2048)
METERED_CHUNKS = (256, 512, 1024, 2048)


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured figure, with the bar it is held against (None: it has none)."""

    name: str
    value: float
    unit: str
    low: float | None = None
    high: float | None = None

    @property
    def verdict(self) -> str:
        """`met`, `missed`, or nothing."""
        if self.low is None and self.high is None:
            return ""
        met = (self.low is None or self.value >= self.low) and (self.high is None or self.value <= self.high)
        return "met" if met else "missed"


class Bench:
    """One loaded model, shared by all sides: the attention implementation is switched between them."""

    def __init__(self, tokens: int, budget: int) -> None:
        self.loaded, self.ids = load(tokens)
        self.budget = budget
        self.profile = find_profile("cpu", {})
        self.session = Session(self.loaded.model, frozenset())
        self._ours = self.session.adapter.name

    def settings(self, schedule: str, chunk: int) -> PrefillSettings:
        """SnapKV at the paper's window, uniform budget, the profile's score block."""
        block = self.profile.score_block
        return PrefillSettings(schedule, SnapKV(), uniform(self.budget), FlashCPU(), chunk, block, NEW_TOKENS)

    def ours(self, schedule: str, chunk: int, ids: list[int] | None = None) -> Prefilled:
        """As `tidekv run` prefills, its live-tensor meter included."""
        self.loaded.model.set_attn_implementation(self._ours)
        prompt, _ = self.session.prefill(ids or self.ids, self.settings(schedule, chunk))
        int(prompt.logits.argmax())
        return prompt

    @torch.no_grad()
    def plain(self, ids: list[int] | None = None) -> Any:
        """One forward of the plain model over the whole prompt."""
        self.loaded.model.set_attn_implementation("sdpa")
        out = self.loaded.model(torch.tensor([ids or self.ids]), use_cache=True, logits_to_keep=1)
        int(out.logits[0, -1].argmax())
        return out

    def transient_mib(self, side: Callable[[], Any]) -> float:
        """Peak of live tensors less what is live while the result is held."""
        gc.collect()
        meter = LiveMeter()
        meter.watch([*self.loaded.model.parameters(), *self.loaded.model.buffers()])
        with meter:
            result = side()
        gc.collect()
        steady = meter.live_bytes
        del result
        return (meter.peak_bytes - steady) / MIB

    def unmetered(self, schedule: str, chunk: int) -> Prefilled:
        """Without the session's own meter, for use under another one."""
        self.loaded.model.set_attn_implementation(self._ours)
        return LayerMajorPrefill(self.session.adapter, torch.tensor([self.ids]), self.settings(schedule, chunk)).run()

    def warm_up(self, *sides: Callable[[list[int]], Any]) -> None:
        """A short prompt through each side, with eviction, so that code and libraries are in memory."""
        budget, self.budget = self.budget, 64
        for side in sides:
            side(self.ids[:256])
        self.budget = budget

    def our_rate(self) -> float:
        """Tokens per second after the first, from the compact cache."""
        prompt = self.ours("tide", 512)
        answer = self.session.generate(prompt, SamplingSettings(), NEW_TOKENS)
        stamps = [time.perf_counter() for _ in answer]
        return (len(stamps) - 1) / (stamps[-1] - stamps[0])

    def plain_rate(self) -> float:
        """The same of `generate` with its own full cache."""
        self.loaded.model.set_attn_implementation("sdpa")
        clock = Stamps()
        prompt = torch.tensor([self.ids])
        self.loaded.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            streamer=clock,
        )
        return (len(clock.stamps) - 1) / (clock.stamps[-1] - clock.stamps[0])


class Stamps:
    """Notes when each new token comes out of `generate`; the first call carries the prompt."""

    def __init__(self) -> None:
        self.stamps: list[float] = []
        self._prompt = True

    def put(self, value: Any) -> None:
        """See transformers."""
        if self._prompt:
            self._prompt = False
        else:
            self.stamps.append(time.perf_counter())

    def end(self) -> None:
        """See transformers."""


def load(tokens: int) -> tuple[LoadedModel, list[int]]:
    """The embedded model in float32, and the first `tokens` ids of the two example documents."""
    files = inspect_model(resolve_model("smollm2-135m", os.environ, offline=False).path)
    text = "".join((ROOT / "examples" / name).read_text(encoding="utf-8") for name in ("lighthouse.txt", "garden.txt"))
    ids = load_tokenizer(files)(text, add_special_tokens=False, verbose=False)["input_ids"]
    return load_model(files, torch.float32), ids[:tokens]


def timed(bench: Bench, rounds: int) -> list[Figure]:
    """TTFT of each side against plain, scoring's share, and decode rates; the order rotates from round to round."""
    sides: dict[str, Callable[..., Any]] = {"plain": bench.plain}
    sides |= {f"tide C={chunk}": partial(bench.ours, "tide", chunk) for chunk in TIMED_CHUNKS}
    sides["oneshot"] = partial(bench.ours, "oneshot", 1)
    deciders = {"ours": bench.our_rate, "generate": bench.plain_rate}
    bench.warm_up(*sides.values())
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}  # seconds, scoring's share
    rates: dict[str, list[float]] = {name: [] for name in deciders}
    for number in range(rounds):
        for name in _rotated(sides, number):
            gc.collect()
            began = time.perf_counter()
            result = sides[name]()
            seconds = time.perf_counter() - began
            scoring = result.scoring_s if isinstance(result, Prefilled) else 0.0
            runs[name].append((seconds, 100 * scoring / seconds))
            del result
            print(f"round {number + 1}: {name} {seconds:.2f} s", file=sys.stderr)
        for name in _rotated(deciders, number):
            gc.collect()
            rates[name].append(deciders[name]())
            print(f"round {number + 1}: decode, {name} {rates[name][-1]:.2f} tokens/s", file=sys.stderr)
    fastest = {name: min(measured) for name, measured in runs.items()}
    plain, _ = fastest.pop("plain")
    figures = [Figure("TTFT, plain transformers", plain, "s")]
    for name, (seconds, _) in fastest.items():
        figures.append(Figure(f"TTFT / plain, {name}", seconds / plain, "", high=_tide_bar(name, 1.03)))
    for name, (_, share) in fastest.items():
        figures.append(Figure(f"scoring share, {name}", share, "% of TTFT", high=_tide_bar(name, 1.0)))
    ours, generate = max(rates["ours"]), max(rates["generate"])
    figures += [
        Figure("decode, compact cache", ours, "tokens/s"),
        Figure("decode, generate with full cache", generate, "tokens/s"),
        Figure("decode / generate", ours / generate, "", low=1.6),
    ]
    return figures


def _rotated(names: Iterable[str], by: int) -> list[str]:
    listed = list(names)
    return listed[by % len(listed) :] + listed[: by % len(listed)]


def _tide_bar(name: str, bar: float) -> float | None:
    return bar if name.startswith("tide") else None


def metered(bench: Bench) -> list[Figure]:
    """Live transient peaks."""
    bars = {256: 35.0, 512: 41.0}
    figures = [
        Figure(
            f"live transient, tide C={chunk}",
            bench.transient_mib(lambda chunk=chunk: bench.unmetered("tide", chunk)),
            "MiB",
            high=bars.get(chunk),
        )
        for chunk in METERED_CHUNKS
    ]
    oneshot = bench.transient_mib(lambda: bench.unmetered("oneshot", 1))
    figures.append(Figure("live transient, oneshot", oneshot, "MiB", low=190, high=205))
    figures.append(Figure("live transient, plain transformers", bench.transient_mib(bench.plain), "MiB"))
    return figures


def grown(tokens: int, budget: int) -> list[Figure]:
    """Growth of resident memory while the prompt is prefilled, each side in a fresh process."""
    growth = {}
    for side in ("plain", "tide", "oneshot"):
        command = [sys.executable, __file__, "--growth", side, "--tokens", str(tokens), "--budget", str(budget)]
        environ = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
        growth[side] = float(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environ).stdout)
    return [
        *(Figure(f"resident growth, {side}", value, "MiB") for side, value in growth.items()),
        Figure("resident growth, tide C=512 / plain", growth["tide"] / growth["plain"], "", high=0.16),
        Figure("resident growth, oneshot / plain", growth["oneshot"] / growth["plain"], ""),
    ]


def growth_of(side: str, tokens: int, budget: int) -> float:
    """MiB between just before the prefill and its highest point, in this process."""
    bench = Bench(tokens, budget)
    run = bench.plain if side == "plain" else partial(bench.ours, side, 512)
    bench.warm_up(run)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the high-water mark starts again
    before = _status_mib("VmRSS")
    result = run()
    del result
    return _status_mib("VmHWM") - before


def _status_mib(key: str) -> float:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))


def main() -> None:
    """Measure, print a table, write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=7500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    parser.add_argument("--quick", action="store_true", help="600 tokens, one round: does it still run?")
    parser.add_argument("--growth", choices=("plain", "tide", "oneshot"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.growth:
        print(growth_of(options.growth, options.tokens, options.budget))
        return
    tokens, rounds = (600, 1) if options.quick else (options.tokens, options.rounds)
    budget = min(options.budget, tokens // 4) if options.quick else options.budget
    bench = Bench(tokens, budget)
    figures = timed(bench, rounds) + metered(bench)
    del bench
    figures += grown(tokens, budget)
    setup = {
        "date": datetime.date.today().isoformat(),
        "machine": detect_device("cpu").name,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": options.threads,
        "tokens": tokens,
        "rounds": rounds,
        "budget": budget,
        "dtype": "float32",
    }
    print(", ".join(f"{key} {value}" for key, value in setup.items()))
    judged = (tokens, budget, options.threads) == (7500, 1024, 2) and rounds >= 3
    for figure in figures:
        bar = " ".join(f"{s} {b:g}" for s, b in ((">=", figure.low), ("<=", figure.high)) if b is not None)
        verdict = f"{bar}  {figure.verdict}" if judged and bar else ""
        print(f"{figure.name:<42}{figure.value:>10.3f} {figure.unit:<10}{verdict}".rstrip())
    if options.json:
        document = {"setup": setup, "figures": [asdict(figure) for figure in figures]}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
