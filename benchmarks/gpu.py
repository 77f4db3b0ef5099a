"""Everything that a GPU is needed to check, in one command of under 8 minutes; no network, no weights.

    python benchmarks/gpu.py [--device cuda:0] [--small] [--json FILE]

Models have the shapes of Llama-3.1-8B (`--small`: tiny ones) and random weights: memory and speed do not depend on the
values. On a CPU it goes through the same steps with the CPU's kernels, so that it can be tried anywhere.

exactness   each attention backend against plain attention in float32 on the CPU: output, LSE, alignment, windows
kept_sets   the positions that stay: device against CPU, one score block against another, both in float32
oom_ladder  a cap on memory below what the first chunk needs: a smaller chunk, the same positions, the next prompt right
plan        planned against measured bytes under caps: live tensors, torch's allocated and reserved, the device's own
speed       seconds to the first token, and tokens per second, of `tide` and `oneshot`
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from tidekv_cli import __version__
from tidekv_cli.assembly import engine_settings, torch_dtype
from tidekv_cli.catalog import shape_of
from tidekv_cli.engine.attention import Eager, Rule
from tidekv_cli.engine.backends import attention_backend, failure
from tidekv_cli.engine.masks import Visible
from tidekv_cli.engine.memory import device_peaks, release_unused
from tidekv_cli.engine.meter import process_peak_bytes
from tidekv_cli.engine.prefill import Prefilled
from tidekv_cli.engine.sampling import SamplingSettings
from tidekv_cli.engine.session import Session
from tidekv_cli.errors import TideError
from tidekv_cli.model_spec import spec_from_config
from tidekv_cli.plan import Planner
from tidekv_cli.plan_settings import PlanSettings
from tidekv_cli.request import RunRequest
from tidekv_cli.setup import set_up

GIB = 1 << 30
TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
WIDE = TINY | {"hidden_size": 512, "head_dim": 64, "num_hidden_layers": 4}
MIDDLE = TINY | {"hidden_size": 1024, "intermediate_size": 3584, "head_dim": 128, "vocab_size": 4096}
NEW_TOKENS = 33  # the first is not counted
# The greatest error of an output or LSE whose inputs were rounded to the dtype.
TOLERANCES = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 3e-2}
# Of a random model's logits, device against CPU, relative to the greatest.
LOGIT_TOLERANCES = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens of each check, and memory caps in bytes."""

    attention: tuple[tuple[int, int, int, int, int], ...]  # Hq, Hkv, n, L, D
    kept: int
    ladder: int
    plans: tuple[tuple[int, str, int], ...]  # cap, schedule, tokens
    speed: int
    budget: int


FULL = Sizes(
    attention=((32, 8, 512, 4096, 128), (32, 8, 1, 4096, 128), (9, 3, 700, 700, 64), (8, 1, 33, 1000, 256)),
    kept=4096,
    ladder=32768,
    plans=((24 * 10**9, "tide", 65536), (24 * 10**9, "oneshot", 16384), (40 * 10**9, "oneshot", 65536)),
    speed=32768,
    budget=4096,
)
SMALL = Sizes(
    attention=((4, 2, 20, 90, 16), (4, 2, 1, 90, 16), (9, 3, 30, 30, 64)),
    kept=700,
    ladder=2000,
    plans=((2 * GIB, "tide", 1500), (2 * GIB, "oneshot", 1500)),
    speed=1000,
    budget=256,
)


class Bench:
    """One device; each check is a method that returns what goes into the result file."""

    def __init__(self, device: str, small: bool) -> None:
        self.request = RunRequest(device=device)
        self.setup = set_up(self.request, {}, {})
        self.device = torch.device(self.setup.device.address)
        self.sizes = SMALL if small else FULL
        self.config: dict[str, Any] = TINY if small else dict(shape_of("llama-3.1-8b") or {})
        self.missed: list[str] = []
        on_card = ("flash-attn", "sdpa", "efficient", "math", "eager")
        names = ("sdpa", "math", "eager") if self.device.type == "cpu" else on_card
        self.backends = [attention_backend(name, self.device.type) for name in names]

    def expect(self, holds: bool, what: str) -> None:
        """Note a bar that is missed."""
        if not holds:
            self.missed.append(what)

    def exactness(self) -> list[dict[str, Any]]:
        """Each backend, dtype, shape and rule; a backend that is not there has a reason in place of figures."""
        rules = {
            "causal": Rule(),
            "window": Rule(Visible(17)),
            "soft-cap": Rule(softcap=5.0),
            "sinks": Rule(sinks=torch.linspace(-1, 1, 32)),
        }
        rows = []
        for backend in self.backends:
            for dtype in TOLERANCES:
                reason = failure(backend, self.device, getattr(torch, dtype), (4, 2, 64))
                if reason is not None:
                    rows.append({"backend": backend.name, "dtype": dtype, "reason": reason})
                    continue
                for heads in self.sizes.attention:
                    for name, rule in rules.items():
                        error = self._attention_error(backend.attend, heads, getattr(torch, dtype), rule)
                        row = {"backend": backend.name, "dtype": dtype, "heads": heads, "rule": name, "error": error}
                        self.expect(error <= TOLERANCES[dtype], f"exactness {row}")
                        rows.append(row)
        self.expect(any("error" in row for row in rows), "exactness: no backend works")
        return rows

    def _attention_error(self, attend: Callable[..., Any], heads: Any, dtype: torch.dtype, rule: Rule) -> float:
        query_heads, kv_heads, rows, length, size = heads
        draw = torch.Generator().manual_seed(length)

        def drawn(count: int, tokens: int) -> Tensor:
            return torch.randn(1, count, tokens, size, generator=draw).to(dtype)

        if rule.sinks is not None:
            rule = replace(rule, sinks=rule.sinks[:query_heads])
        there = rule if rule.sinks is None else replace(rule, sinks=rule.sinks.to(self.device))
        tensors = [drawn(query_heads, rows), drawn(kv_heads, length), drawn(kv_heads, length)]
        found = attend(*(tensor.to(self.device) for tensor in tensors), size**-0.5, there)
        expected = Eager().attend(*[tensor.float() for tensor in tensors], size**-0.5, rule)
        return max(float((a.float().cpu() - b).abs().max()) for a, b in zip(found, expected, strict=True))

    def kept_sets(self) -> list[dict[str, Any]]:
        """For each dtype, how many of the heads keep other positions, and how far the last token's logits are off."""
        return [self._kept_sets(dtype) for dtype in dict.fromkeys(("float32", self.setup.choice.dtype))]

    def _kept_sets(self, dtype: str) -> dict[str, Any]:
        model = random_model(WIDE, getattr(torch, dtype), torch.device("cpu"))
        ids = token_ids(self.sizes.kept, WIDE)
        name = self._attention(dtype, WIDE)
        base = {"chunk_size": 256, "score_block": 128, "budget_tokens": 200, "record_kept": True}
        settings = self._settings(WIDE, "tide", dtype, name, **base)
        on_cpu = prefilled(model, replace(settings, device_kind="cpu", attention="sdpa"), ids)
        model.to(self.device)
        first = prefilled(model, settings, ids)
        blocks = [prefilled(model, replace(settings, score_block=block), ids).kept for block in (64, 1000, len(ids))]
        whole = prefilled(model, with_schedule(settings, "oneshot"), ids).kept
        result = {
            "dtype": dtype,
            "attention": name,
            "heads": sum(kept.shape[0] for kept in first.kept),
            "logits_error": float((first.logits.cpu() - on_cpu.logits).abs().max() / on_cpu.logits.abs().max()),
            "device_against_cpu": differing(first.kept, on_cpu.kept),
            "score_blocks": [differing(first.kept, other) for other in blocks],
            "oneshot_against_tide": differing(first.kept, whole),
        }
        allowed = max(result["heads"] // 100, 1)
        self.expect(max(result["score_blocks"]) <= allowed, f"kept_sets: they depend on the score block: {result}")
        if dtype == "float32":  # rounding to half precision moves scores by more than they differ by
            for key in ("device_against_cpu", "oneshot_against_tide"):
                self.expect(result[key] <= allowed, f"kept_sets: {key} of {result}")
        self.expect(result["logits_error"] <= LOGIT_TOLERANCES[dtype], f"kept_sets: logits of {result}")
        return result

    def oom_ladder(self) -> dict[str, Any]:
        """A cap between what a chunk of 8192 and one of 1024 tokens need (a quarter of it all on a CPU)."""
        config = TINY if self.sizes is SMALL else MIDDLE
        dtype = self.setup.choice.dtype
        big, least = (1024, 256) if self.sizes is SMALL else (8192, 1024)
        settings = self._settings(
            config, "tide", dtype, self._attention(dtype, config), chunk_size=big, score_block=256, record_kept=True
        )
        settings = replace(settings, budget_tokens=self.sizes.budget)
        ids = token_ids(self.sizes.ladder, config)
        high, low = (Planner(replace(settings, chunk_size=chunk), None).bytes(len(ids)).live for chunk in (big, least))
        model = random_model(config, torch_dtype(settings), self.device)
        free_run = prefilled(model, settings, ids)
        with capped(self.device, (high + low) // 2):
            ceiling = (high + low) // 2 if self.device.type == "cpu" else None
            squeezed = prefilled(model, settings, ids, ceiling)
        again = prefilled(model, settings, ids)
        result = {
            "live_bytes": {str(big): high, str(least): low},
            "lowered": list(squeezed.lowered),
            "heads": sum(kept.shape[0] for kept in free_run.kept),
            "capped_against_free": differing(squeezed.kept, free_run.kept),
            "after_it": differing(again.kept, free_run.kept),
        }
        self.expect(bool(squeezed.lowered), "oom_ladder: nothing was lowered")
        alike = result["capped_against_free"] <= max(result["heads"] // 100, 1)
        self.expect(alike or dtype != "float32", f"oom_ladder: other positions under the cap: {result}")
        self.expect(not again.lowered and result["after_it"] == 0, f"oom_ladder: the next prompt differs: {result}")
        return result

    def plan_and_speed(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """One model for both, since making it takes longest."""
        dtype = self.setup.choice.dtype
        name = self._attention(dtype, self.config)
        settings = self._settings(self.config, "tide", dtype, name, budget_tokens=self.sizes.budget)
        model = random_model(self.config, torch_dtype(settings), self.device)
        session = Session(model, frozenset())
        plans = [self._planned(session, settings, *case) for case in self.sizes.plans]
        sides = [with_schedule(settings, schedule) for schedule in ("tide", "oneshot")] * 3  # interleaved
        rounds = [self._timed(session, side) for side in sides]
        speeds = [
            {
                "schedule": schedule,
                "tokens": self.sizes.speed,
                "ttft_s": min(one["ttft_s"] for one in rounds if one["schedule"] == schedule),
                "decode_tokens_per_s": max(one["decode_tokens_per_s"] for one in rounds if one["schedule"] == schedule),
            }
            for schedule in ("tide", "oneshot")
        ]
        return plans, speeds

    def _planned(
        self, session: Session, settings: PlanSettings, cap: int, schedule: str, tokens: int
    ) -> dict[str, Any]:
        settings = with_schedule(settings, schedule)
        planned = Planner(settings, None).bytes(tokens)
        cap = min(cap, self.setup.free_bytes or cap)
        row: dict[str, Any] = {
            "cap_bytes": cap,
            "schedule": schedule,
            "tokens": tokens,
            "planned_live_bytes": planned.live,
            "planned_peak_bytes": planned.peak,
            "fits": planned.peak <= cap,
        }
        beside_torch = sum(settings.reserve_items.get(item, 0) for item in ("process", "context", "system"))
        with capped(self.device, cap - beside_torch):
            backend = attention_backend(settings.attention, settings.device_type)
            ids = token_ids(tokens, self.config)
            try:
                prompt, live = session.prefill(ids, engine_settings(settings, tokens, backend))
            except MemoryError as error:
                self.expect(not row["fits"], f"plan: {row} was predicted to fit, but {error}")
                return row | {"ran": False}
        allocated, reserved = device_peaks(self.setup.device.address)
        row |= {
            "ran": True,
            "lowered": list(prompt.lowered),
            "measured_live_bytes": live,
            "allocated_peak_bytes": allocated,
            "reserved_peak_bytes": reserved,
            "device_used_bytes": self._device_used(),
            "process_peak_bytes": process_peak_bytes(),
        }
        self.expect(abs(live - planned.live) <= planned.live // 100, f"plan: live tensors of {row}")
        if allocated is not None:
            self.expect(allocated <= planned.live * 1.02 + (64 << 20), f"plan: allocated bytes of {row}")
        if reserved is not None:
            self.expect(reserved <= planned.peak, f"plan: reserved bytes of {row}")
        return row

    def _timed(self, session: Session, settings: PlanSettings) -> dict[str, Any]:
        ids = token_ids(self.sizes.speed, self.config)
        backend = attention_backend(settings.attention, settings.device_type)
        began = time.perf_counter()
        prompt, _ = session.prefill(ids, engine_settings(settings, len(ids), backend))
        stamps = [time.perf_counter() for _ in session.generate(prompt, SamplingSettings(), NEW_TOKENS)]
        rate = (len(stamps) - 1) / (stamps[-1] - stamps[0])
        return {"schedule": settings.method.schedule, "ttft_s": stamps[0] - began, "decode_tokens_per_s": rate}

    def _attention(self, dtype: str, config: dict[str, Any]) -> str:
        """What `tidekv run` would take."""
        choice = replace(self.setup.choice, dtype=dtype)
        return replace(self.setup, choice=choice).attention(spec_from_config(config, "benchmark")).name

    def _settings(self, config: dict[str, Any], schedule: str, dtype: str, attention: str, **more: Any) -> PlanSettings:
        spec = spec_from_config(config, "benchmark")
        base = replace(self.setup.plan_settings(spec, config, attention), dtype=dtype, max_new_tokens=NEW_TOKENS)
        return replace(with_schedule(base, schedule), **more)

    def _device_used(self) -> int | None:
        """All that is taken on the card, by whomever: CUDA's context too, which torch does not count."""
        if self.device.type != "cuda":
            return None
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free


@contextmanager
def capped(device: torch.device, nbytes: int) -> Iterator[None]:
    """Torch gets no more than that of a CUDA device's memory."""
    release_unused(device)
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_per_process_memory_fraction(min(nbytes / torch.cuda.mem_get_info(device)[1], 1.0), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def with_schedule(settings: PlanSettings, schedule: str) -> PlanSettings:
    """The same under another schedule."""
    return replace(settings, method=replace(settings.method, schedule=schedule))


def random_model(config: dict[str, Any], dtype: torch.dtype, device: torch.device) -> Any:
    """A model of that shape, made on the device, the same weights each time."""
    values = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")}
    torch.manual_seed(0)
    with device:
        made = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**values), dtype=dtype)
    return made.eval().requires_grad_(False)


def token_ids(count: int, config: dict[str, Any]) -> list[int]:
    """Random ids."""
    return torch.randint(config["vocab_size"], (count,), generator=torch.Generator().manual_seed(1)).tolist()


def prefilled(model: Any, settings: PlanSettings, ids: Sequence[int], ceiling: int | None = None) -> Prefilled:
    """The compact cache of `ids`, by a session of its own."""
    backend = attention_backend(settings.attention, settings.device_type)
    engine = engine_settings(settings, len(ids), backend)
    return Session(model, frozenset()).prefill(ids, engine, ceiling_bytes=ceiling)[0]


def differing(some: Sequence[Tensor], others: Sequence[Tensor]) -> int:
    """Heads, over all layers, that keep other positions."""
    pairs = zip(some, others, strict=True)
    return sum(int((one.cpu() != other.cpu()).any(-1).sum()) for one, other in pairs)


def card(device: torch.device) -> dict[str, Any]:
    """What it ran on."""
    found: dict[str, Any] = {"device": str(device), "python": platform.python_version(), "torch": torch.__version__}
    found |= {"transformers": transformers.__version__, "tidekv": __version__}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        capability = f"{properties.major}.{properties.minor}"
        found |= {"name": properties.name, "capability": capability, "total_bytes": properties.total_memory}
        found["cuda"] = torch.version.cuda
    return found


def _write(result: dict[str, Any], path: Path | None) -> None:
    """After each check, so that what follows cannot cost what is there."""
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--small", action="store_true", help="tiny shapes, for a try")
    parser.add_argument("--json", type=Path, help="where the result goes; without it, to stdout")
    arguments = parser.parse_args()
    began = time.perf_counter()
    try:
        bench = Bench(arguments.device, arguments.small)
    except TideError as error:
        parser.exit(int(error.code), f"error: {error.message}\nhint: {error.hint}\n")
    for warning in bench.setup.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if bench.device.type == "cpu" and not arguments.small:
        parser.exit(2, "error: there is no GPU that works, and these shapes are for one\nhint: use --small\n")
    result: dict[str, Any] = {"schema": 1, "date": datetime.date.today().isoformat(), "on": card(bench.device)}
    seconds: dict[str, float] = {}
    try:
        _write(result, arguments.json)
    except OSError as error:
        parser.exit(2, f"error: {arguments.json} cannot be written: {error.strerror}\nhint: give another --json\n")
    for name in ("exactness", "kept_sets", "oom_ladder", "plan_and_speed"):
        started = time.perf_counter()
        try:
            found = getattr(bench, name)()
        except KeyboardInterrupt:
            bench.missed.append(f"{name} and what follows: interrupted")
            break
        except (RuntimeError, MemoryError, ValueError, TideError) as error:  # must not cost the other checks
            bench.missed.append(f"{name}: {type(error).__name__}: {str(error).strip().splitlines()[:1]}")
        else:
            result |= dict(zip(("plan", "speed"), found, strict=True)) if name == "plan_and_speed" else {name: found}
        gc.collect()
        release_unused(bench.device)
        seconds[name] = round(time.perf_counter() - started, 1)
        print(f"{name}: {seconds[name]} s", file=sys.stderr)
        result |= {"seconds": {**seconds, "all": round(time.perf_counter() - began, 1)}, "missed": bench.missed}
        _write(result, arguments.json)
    if arguments.json is None:
        print(json.dumps(result, indent=1))
    for line in bench.missed:
        print(f"missed: {line}", file=sys.stderr)
    sys.exit(1 if bench.missed else 0)


if __name__ == "__main__":
    main()
