"""The choice: what was asked for, and where that does not fit, a smaller chunk, score block, then budget.

What the user named stays as it is. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tidekv_cli.errors import DoesNotFitError
from tidekv_cli.methods import conflict
from tidekv_cli.plan import Plan, Planner, last_that_fits
from tidekv_cli.plan_settings import PlanSettings
from tidekv_cli.request import EngineChoice
from tidekv_cli.units import ITEM_BYTES, format_bytes

_LEAST = 256  # tokens of a chunk, of a score block, and of a budget that nobody asked for
_BUDGET_STEP = 64
_SAME_FOR_ANY_CHUNK = ("tide", "chunked")  # schedules that have chunks, whose size does not change what is kept
_SAME_BY_LAYERS = ("oneshot", "chunked")  # schedules that end with the cache that `tide` ends with


class Fitter:
    """Plans prompts under one choice. `least_budget` is what the selector always keeps."""

    def __init__(self, choice: EngineChoice, least_budget: int, directory: Path | None) -> None:
        self._choice = choice
        self._least_budget = least_budget
        self._directory = directory

    def starting_point(self, settings: PlanSettings) -> PlanSettings:
        """Nothing lowered yet; a budget that is chosen by what fits begins at the least."""
        auto = self._choice.budget == "auto"
        return replace(settings, budget_tokens=self._least_budget) if auto else settings

    def plan(self, settings: PlanSettings, length: int) -> Plan:
        """The first plan that fits a prompt of `length` tokens; if none does, the one that takes least."""
        settings = self.starting_point(settings)
        changes: list[str] = []
        for field, sizes in self._smaller(settings):
            planned, free = self._planner(settings).bytes(length), settings.free_bytes
            peak = planned.peak
            if free is None or peak <= free or planned.weights + planned.reserve > free:
                break
            lowered = self._lowered(settings, field, sizes, length)
            if self._planner(lowered).bytes(length).peak < peak:
                why = f"the predicted peak of {format_bytes(peak)} exceeds the {format_bytes(free)} free"
                before, after = getattr(settings, field), getattr(lowered, field)
                changes.append(f"{field.removesuffix('_tokens')} {before} -> {after}: {why}")
                settings = lowered
        plan = replace(self._planner(settings).plan(length), changes=tuple(changes))
        if self._choice.budget == "auto" and plan.fits:
            # The longest prompt is that of the least budget; this one's budget is the largest that fits.
            settings = replace(settings, budget_tokens=self._largest_budget(settings, length))
            plan = replace(self._planner(settings).plan(length, plan.memory_prompt_tokens), changes=plan.changes)
        return replace(plan, full_cache_peak=_full_cache_peak(plan))

    def _smaller(self, settings: PlanSettings) -> Iterator[tuple[str, list[int]]]:
        """Each field that may be lowered, in order, with its smaller values."""
        fixed, method = self._choice.fixed, settings.method
        least = {
            "chunk_size": _LEAST if method.schedule in _SAME_FOR_ANY_CHUNK and "chunk_size" not in fixed else None,
            "score_block": _LEAST if method.selector_info.scores != "none" and "score_block" not in fixed else None,
            "budget_tokens": max(_LEAST, self._least_budget) if "budget" not in fixed else None,
        }
        for field, size in least.items():
            sizes = [] if size is None else _halves(getattr(settings, field) or 0, size)
            if sizes:
                yield field, sizes

    def _lowered(self, settings: PlanSettings, field: str, sizes: list[int], length: int) -> PlanSettings:
        """With the largest of the falling `sizes` at which the prompt fits, or else with the least."""
        changes: list[dict[str, Any]] = [{field: size} for size in sizes]
        trials = [replace(settings, **change) for change in changes]
        if not self._planner(trials[-1]).fits(length):
            return trials[-1]
        return next(trial for trial in trials if self._planner(trial).fits(length))

    def _largest_budget(self, settings: PlanSettings, length: int) -> int:
        """The largest at which the prompt fits: all of it, or a multiple of 64; the least is known to fit."""
        window = settings.spec.context_window
        most = min(length, window) if settings.slots and window is not None else length
        if settings.free_bytes is None or self._least_budget >= most:
            return most
        return last_that_fits(
            lambda budget: self._planner(replace(settings, budget_tokens=budget)).headroom(length),
            self._least_budget,
            most,
            _BUDGET_STEP,
        )

    def _planner(self, settings: PlanSettings) -> Planner:
        return Planner(settings, self._directory)

    def gains(self, plan: Plan) -> dict[str, int]:
        """Flags that raise the largest context, each with the tokens that memory then takes; most first."""
        gained = {}
        for flag, changed in _savers(plan.settings):
            prompt = self._planner(changed).largest_prompt
            if prompt and prompt > (plan.memory_prompt_tokens or 0):
                gained[flag] = prompt + changed.max_new_tokens
        return dict(sorted(gained.items(), key=lambda entry: -entry[1]))

    def lowered_context(self, plan: Plan) -> int | None:
        """What memory takes in tokens once all that `plan` lowers for a prompt is at its least."""
        settings = plan.settings
        for field, sizes in self._smaller(settings):
            least: dict[str, Any] = {field: sizes[-1]}
            settings = replace(settings, **least)
        prompt = self._planner(settings).largest_prompt if settings != plan.settings else None
        return prompt + settings.max_new_tokens if prompt else None

    def refusal(self, plan: Plan) -> DoesNotFitError:
        """The error for a plan that does not fit: the longest prompt that does, and the flag that helps most."""
        settings, free = plan.settings, plan.settings.free_bytes
        fixed = plan.bytes.weights + plan.bytes.reserve
        hopeless = free is not None and fixed > free
        savers = {
            flag: changed for flag, changed in _savers(settings) if not hopeless or changed.dtype != settings.dtype
        }
        ways = {flag: self._planner(changed).bytes(plan.prompt_tokens).peak for flag, changed in savers.items()}
        flag = min(ways, key=lambda name: ways[name], default="")
        if hopeless and (free is None or ways.get(flag, fixed) > free):
            less = f" ({flag} {format_bytes(ways[flag])})" if flag else ""
            way = f"weights and reserve alone take {format_bytes(fixed)}{less}: use a smaller model or a larger device"
        elif not flag or ways[flag] >= plan.bytes.peak:
            way = "no single flag helps"
        else:
            enough = "fits" if free is None or ways[flag] <= free else "helps most but is not enough"
            way = f"{flag} {enough}, with {format_bytes(ways[flag])}"
        longest = plan.memory_prompt_tokens
        shorter = f"a prompt of {longest} tokens fits (--truncate)" if longest else "no prompt fits"
        lowered = f" (after {'; '.join(change.split(':')[0] for change in plan.changes)})" if plan.changes else ""
        return DoesNotFitError(
            f"the predicted peak {format_bytes(plan.bytes.peak)} exceeds the {format_bytes(free)} free{lowered}",
            f"{way}; at this setting {shorter}",
        )


def _full_cache_peak(plan: Plan) -> int | None:
    """About what the peak would be in bytes with nothing evicted, if that fits and something is.

    The rows that are evicted now would be on top of it.
    """
    settings, spec, free = plan.settings, plan.settings.spec, plan.settings.free_bytes
    evicts = settings.budget_tokens is not None and settings.budget_tokens < plan.prompt_tokens
    if settings.budget_tokens is None or not evicts or settings.method.kv_store == "quantized":
        return None
    row = 2 * spec.layers * spec.kv_heads * spec.head_dim * ITEM_BYTES[settings.dtype]
    peak = plan.bytes.peak + (plan.prompt_tokens - settings.budget_tokens) * row
    return None if free is None or peak > free else peak


def raising_flags(settings: PlanSettings) -> list[str]:
    """Flags that take less memory than `settings`."""
    return [flag for flag, _ in _savers(settings)]


def _halves(size: int, least: int) -> list[int]:
    """`size` halved again and again, down to `least`."""
    sizes = []
    while size > least:
        size = max(size // 2, least)
        sizes.append(size)
    return sizes


def _savers(settings: PlanSettings) -> Iterator[tuple[str, PlanSettings]]:
    """Flags that may lower the peak, each with the settings that it gives."""
    tide = replace(settings.method, schedule="tide")
    if settings.method.schedule in _SAME_BY_LAYERS and conflict(tide) is None:
        yield "--schedule tide", replace(settings, method=tide)
    if settings.method.schedule in _SAME_FOR_ANY_CHUNK and settings.chunk_size > _LEAST:
        yield f"--chunk-size {_LEAST}", replace(settings, chunk_size=_LEAST)
    if settings.dtype == "float32":
        yield "--dtype bfloat16", replace(settings, dtype="bfloat16")
    least = max(_LEAST, settings.mandatory_tokens)
    if settings.method.selector_info.budgeted and (settings.budget_tokens or least + 1) > least:
        yield f"--budget {least}", replace(settings, budget_tokens=least)
