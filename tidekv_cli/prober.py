"""`tidekv probe-capacity` from request to answer: shapes, plan, rows, real runs. Loads no weights itself."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tidekv_cli.capacity import Capacity, probe
from tidekv_cli.environment import Environment
from tidekv_cli.errors import MemoryExhaustedError, UsageError, WindowError
from tidekv_cli.model import Model
from tidekv_cli.outcome import SCHEMA, device_document, plan_document
from tidekv_cli.plan import Planner
from tidekv_cli.plan_settings import PlanSettings
from tidekv_cli.report import Reporter
from tidekv_cli.request import EngineChoice, RunRequest
from tidekv_cli.setup import Setup
from tidekv_cli.verify import measure

_LONGEST_SIMULATED = 1 << 24  # tokens


@dataclass(frozen=True, slots=True)
class ProbeRequest:
    """The flags that `probe-capacity` has beside those of `run`."""

    contexts: Sequence[int] = ()
    simulate: bool = False
    verify: bool = False
    arguments: bool = False


class Prober:
    """One probe."""

    def __init__(self, request: RunRequest, wanted: ProbeRequest, environment: Environment) -> None:
        self._request, self._wanted, self._environment = request, wanted, environment
        self._reporter = Reporter(environment, request.quiet, request.verbose)

    def run(self) -> None:
        """Answer on stdout. Raises `DoesNotFitError` where no context fits, before any weight is loaded."""
        request, wanted, environ = self._request, self._wanted, self._environment.environ
        if wanted.arguments and request.json:
            raise UsageError("--args and --json exclude each other", "drop one of them")
        model = Model(request, environ, self._reporter.note, self._reporter.warning, compute=False)
        name, setup, fitter = model.name, model.setup, model.fitter
        if wanted.verify and setup.elsewhere:
            raise UsageError(
                f"--verify needs the device itself, and {setup.profile.name} is not here", "leave out --profile"
            )
        settings = fitter.starting_point(model.settings())
        planner = Planner(settings, setup.plans, exact=wanted.simulate)
        _check_lengths(planner, wanted)
        capacity = probe(planner, wanted.contexts)
        if not capacity.plan.fits:
            raise fitter.refusal(fitter.plan(settings, 1))
        if wanted.verify:
            capacity = self._verified(capacity, planner, setup)
        if wanted.arguments:
            self._environment.write(shlex.join(_flags(name, settings, setup.choice, request)) + "\n")
        elif request.json:
            self._environment.write(json.dumps(_document(name, capacity, setup), ensure_ascii=False) + "\n")
        else:
            by_memory = capacity.limited_by == "memory"
            gains = fitter.gains(capacity.plan) if by_memory else {}
            lowered = fitter.lowered_context(capacity.plan) if by_memory else None
            self._reporter.capacity(name, setup.device, setup.profile.name, capacity, gains, lowered)

    def _verified(self, capacity: Capacity, planner: Planner, setup: Setup) -> Capacity:
        """The largest context really run, and where memory limits it, one chunk more."""
        settings, most = planner.settings, capacity.plan.max_context_tokens
        if most is None:
            raise UsageError("--verify needs a largest context, and free memory is unknown", "give --memory-limit")
        contexts = (most, most + settings.chunk_size) if capacity.limited_by == "memory" else (most,)
        rows = []
        for row in probe(planner, contexts).rows:
            self._reporter.note(f"running {row.context_tokens} tokens")
            prompt_tokens = row.context_tokens - settings.max_new_tokens
            measured = measure(self._pinned(settings), prompt_tokens, self._environment.environ)
            if measured.failure is not None:
                if row.context_tokens == most:
                    raise MemoryExhaustedError(
                        f"{most} tokens were predicted to fit, but: {measured.failure}",
                        "see what else takes memory, or give a lower --memory-limit",
                    )
                self._reporter.note(f"{row.context_tokens} tokens: {measured.failure}")
            rows.append(
                replace(
                    row,
                    measured_peak_bytes=measured.live_peak_bytes,
                    process_peak_bytes=measured.process_peak_bytes,
                    failure=measured.failure,
                )
            )
        others = [row for row in capacity.rows if row.context_tokens not in contexts]
        return replace(capacity, rows=tuple(sorted([*others, *rows], key=lambda row: row.context_tokens)))

    def _pinned(self, settings: PlanSettings) -> RunRequest:
        """The request with everything named that the plan chose."""
        budget = "full" if settings.budget_tokens is None else str(settings.budget_tokens)
        return replace(
            self._request,
            chunk_size=settings.chunk_size,
            score_block=settings.score_block,
            budget=budget if settings.method.selector_info.budgeted else None,
            dtype=settings.dtype,
            attention=settings.attention,
            max_new_tokens=settings.max_new_tokens,
        )


def _check_lengths(planner: Planner, wanted: ProbeRequest) -> None:
    """Raise where no prompt is left beside the new tokens, or a length is too long to be simulated."""
    window, new = planner.settings.context_limit, planner.settings.max_new_tokens
    if window is not None and new >= window:
        raise WindowError(
            f"{new} new tokens leave no room for a prompt in the model's window of {window}",
            "use a smaller --max-new-tokens",
        )
    shortest = min(wanted.contexts, default=new + 1)
    if shortest <= new:
        raise UsageError(
            f"--context {shortest} is impossible: it leaves no prompt beside {new} new tokens",
            f"give at least {new + 1} tokens, or a smaller --max-new-tokens",
        )
    longest = max(wanted.contexts, default=0)
    if longest > _LONGEST_SIMULATED and (wanted.simulate or planner.bends):
        raise UsageError(
            f"--context {longest} is too long to be simulated: at most {_LONGEST_SIMULATED}",
            "leave out --simulate and --attention, or give shorter lengths",
        )


def _flags(model: str, settings: PlanSettings, choice: EngineChoice, request: RunRequest) -> list[str]:
    """For `tidekv run`: what was planned with."""
    method = settings.method
    flags = ["--model", model, "--schedule", method.schedule, "--selector", method.selector]
    flags += ["--budget-policy", method.budget_policy, "--kv-store", method.kv_store]
    if method.selector_info.budgeted:
        flags += ["--budget", str(choice.budget)]
    flags += ["--chunk-size", str(settings.chunk_size), "--score-block", str(settings.score_block)]
    flags += ["--attention", settings.attention, "--dtype", settings.dtype]
    flags += ["--max-new-tokens", str(settings.max_new_tokens)]
    for key, value in request.parameters.items():
        flags += ["--set", f"{key}={value}"]
    if request.memory_limit is not None:
        flags += ["--memory-limit", request.memory_limit]
    return flags


def _document(model: str, capacity: Capacity, setup: Setup) -> dict[str, Any]:
    plan = capacity.plan
    return {
        "schema": SCHEMA,
        "model": model,
        "device": device_document(setup.device, setup.profile.name),
        "plan": plan_document(plan),
        "max_context_tokens": plan.max_context_tokens,
        "memory_context_tokens": plan.memory_context_tokens,
        "limited_by": capacity.limited_by,
        "rows": [
            {
                "context_tokens": row.context_tokens,
                "fits": row.fits,
                "within_window": row.within_window,
                "peak_bytes": row.bytes.peak,
                "headroom_bytes": row.headroom_bytes,
                "bytes": asdict(row.bytes),
                "measured_peak_bytes": row.measured_peak_bytes,
                "process_peak_bytes": row.process_peak_bytes,
                "failure": row.failure,
            }
            for row in capacity.rows
        ],
    }
