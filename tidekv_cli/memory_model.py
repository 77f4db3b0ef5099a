"""Bytes by item and phase at any prompt length: a few lengths simulated, kept on disk, and straight lines through them.

At fixed settings each phase's peak is affine in the length S once S is past the budget, the blocks that wait for the
top-k, and three chunks; so too past each window of sliding layers. Before that, and where attention forms matrices of
logits, the length itself is simulated, which needs torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tidekv_cli.axes import SELECTORS
from tidekv_cli.plan_settings import PlanSettings, Regimes

_FORMAT = 4
_CUDA_GRANULARITY = 512  # torch's CUDA allocator rounds each block up to it
_ALIGNED = 256  # so many tokens fill whole blocks of an allocator, so lines have no rounding in them
_FAR = 1 << 16
_GROWING_STORAGES = 16
_SEARCH_BITS = 8  # less than 1 % more
_ITEMS = ("workspace", "weights", "cache", "bridge", "active_kv", "scoring")  # as the engine's ledger calls them
_SIMULATING = ("axes", "simulate", "few_layers", "left_out", "token_major_phases", "assembly")
Phases = list[dict[str, int]]


class MemoryModel:
    """Live bytes of one set of settings; each phase's items are those at its own peak."""

    def __init__(self, settings: PlanSettings, directory: Path | None) -> None:
        """`directory` keeps what was simulated, but for selectors of other packages; None keeps it for this object."""
        self._settings = settings
        foreign = settings.method.selector not in SELECTORS  # what it takes may change with its package
        self._file = None if directory is None or foreign else directory / f"{_key(settings)}.json"
        self._regimes, self._samples = (None, {}) if self._file is None else _read(self._file)

    def peak(self, length: int) -> dict[str, int]:
        """Bytes by item at the highest moment of a prompt of `length` tokens, from the lines."""
        items = _highest(self.phases(length))
        # What grows with the length may round up by a block.
        if self._granularity > 1 and self._line_for(length) is not None:
            whole_cache = 2 * self._settings.spec.layers if self._settings.budget_tokens is None else 0
            items["workspace"] += self._granularity * (whole_cache + _GROWING_STORAGES)
        return items

    def near(self, length: int) -> int:
        """The length to ask about in a search: off the lines a little more, so that few have to be simulated."""
        if self._line_for(length) is not None:
            return length
        step = max(1 << length.bit_length() >> _SEARCH_BITS, 1)
        rounded = -(-length // step) * step
        if self._borders(length) != self._borders(rounded):
            return length
        return rounded if self.bends or length > self.lines[0] else min(rounded, self.lines[0])

    def simulated(self, length: int) -> dict[str, int]:
        """The same, simulated at this very length."""
        return _highest(self._sampled(length))

    def phases(self, length: int) -> Phases:
        """Bytes by item at the peak of each of `simulate`'s phases."""
        starts = self._line_for(length)
        if starts is None:
            return self._sampled(length)
        found = self._on_lines(starts, length)
        step = self.regimes.step
        if step > 1:  # a group of rows is held whole, and takes most just before it is full
            rounded = self._on_lines(starts, -(-(length + 1) // step) * step - 1)
            found = [{**phase, "cache": more["cache"]} for phase, more in zip(found, rounded, strict=True)]
        return found

    def _on_lines(self, starts: tuple[int, ...], length: int) -> Phases:
        # All of a whole prompt's activations grow with it, and another moment may be the highest further on.
        lines = [self._line(start, self.lines[1], length) for start in starts]
        return [_highest(phase) for phase in zip(*lines, strict=True)]

    def _borders(self, length: int) -> tuple[int, float]:
        """The longest window that hides something from a prompt of `length` tokens, and the next that does not."""
        longest = length + self._settings.max_new_tokens
        hiding = [window for window in self.regimes.windows if window < longest]
        others = [window for window in self.regimes.windows if window >= longest]
        return max(hiding, default=0), min(others, default=math.inf)

    def _line_for(self, length: int) -> tuple[int, ...] | None:
        """Where the lines begin that `length` lies on, None if it lies on none."""
        begin, step = self.lines
        if self.bends or length <= begin:
            return None
        low, high = self._borders(length)
        start = begin + -(-low // _ALIGNED) * _ALIGNED
        last = high - step - self._settings.max_new_tokens
        if length <= start or start > last:
            return None
        return (start, _FAR) if self._whole and start < _FAR <= last else (start,)

    def _line(self, start: int, step: int, length: int) -> Phases:
        """Each phase's items at `length`, on the line through `start` and the next step, rounded up."""
        pairs = zip(self._sampled(start), self._sampled(start + step), strict=True)
        return [{item: a[item] - (a[item] - b[item]) * (length - start) // step for item in a} for a, b in pairs]

    @property
    def lines(self) -> tuple[int, int]:
        """Where the lines begin, and how far apart the two lengths are that they go through."""
        settings = self._settings
        chunk = _ALIGNED if self._whole else settings.chunk_size
        # The top-k holds two blocks beside its best, and its positions when a whole block comes after the first choice.
        waiting = 4 * settings.score_block if settings.method.selector_info.scores != "none" else 0
        start = self.regimes.rows + waiting + settings.window + 3 * chunk
        aligned = math.lcm(_ALIGNED, self.regimes.step)
        before = 1 if self.regimes.step > 1 else 0  # a group is full
        return -(-start // aligned) * aligned - before, math.lcm(chunk, aligned)

    @property
    def _whole(self) -> bool:
        return self._settings.method.schedule == "oneshot"

    @property
    def bends(self) -> bool:
        """Whether each length is simulated."""
        return self.regimes.bends

    @property
    def regimes(self) -> Regimes:
        """Where the lines end."""
        if self._regimes is None:
            from tidekv_cli.simulate import regimes

            self._regimes = regimes(self._settings)
        return self._regimes

    @property
    def _granularity(self) -> int:
        return 1 if self._settings.device_kind == "cpu" else _CUDA_GRANULARITY

    def _sampled(self, length: int) -> Phases:
        if length not in self._samples:
            from tidekv_cli.simulate import simulate

            self._samples[length] = simulate(self._settings, length, self._granularity)
            if self._file is not None:
                _write(self._file, self.regimes, self._samples)
        return self._samples[length]


def _highest(phases: Sequence[dict[str, int]]) -> dict[str, int]:
    totals = [sum(items.values()) for items in phases]
    return dict(phases[totals.index(max(totals))])


def _key(settings: PlanSettings) -> str:
    """Of everything that changes a simulated figure."""
    values: dict[str, Any] = {
        "format": _FORMAT,
        "versions": [version(name) for name in ("torch", "transformers")],
        "engine": _engine_digest(),
        "config": dict(settings.config),
        "method": [settings.method.schedule, settings.method.selector, settings.method.budget_policy],
        "store": settings.method.kv_store,
        "parameters": dict(settings.axis_settings),
        "sizes": [settings.chunk_size, settings.score_block, settings.budget_tokens, settings.max_new_tokens],
        "how": [settings.dtype, settings.attention, settings.device_kind, settings.record_kept],
    }
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:32]


@cache
def _engine_digest() -> str:
    """Of the sources that a simulation runs: another engine takes other bytes."""
    package = Path(__file__).parent
    beside = [package / f"{name}.py" for name in _SIMULATING]
    digest = hashlib.sha256()
    for path in sorted([*(package / "engine").rglob("*.py"), *beside]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _read(file: Path) -> tuple[Regimes | None, dict[int, Phases]]:
    """What an earlier process simulated; a damaged file is as good as none."""
    try:
        if not file.is_file():  # a pipe may never be written to
            return None, {}
        kept = json.loads(file.read_text(encoding="utf-8"))
        samples = {int(length): phases for length, phases in kept["samples"].items()}
        whole = all(_is_phase(phase) for phases in samples.values() for phase in phases)
        regimes = Regimes(tuple(kept["windows"]), kept["bends"], kept["rows"], kept["step"])
        counts = *regimes.windows, regimes.rows, regimes.step
        whole = whole and type(regimes.bends) is bool and all(type(count) is int for count in counts)
    except (OSError, ValueError, AttributeError, TypeError, RecursionError, KeyError):
        return None, {}
    phases_each = {len(phases) for phases in samples.values()}
    return (regimes, samples) if whole and len(phases_each) == 1 and 0 not in phases_each else (None, {})


def _is_phase(phase: Any) -> bool:
    return set(phase) == set(_ITEMS) and all(type(phase[item]) is int and phase[item] >= 0 for item in _ITEMS)


def _write(file: Path, regimes: Regimes, samples: dict[int, Phases]) -> None:
    """In one step; where there is no place to write, the next process simulates again."""
    scratch = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(json.dumps({**asdict(regimes), "samples": samples}), encoding="utf-8")
        os.replace(scratch, file)
    except OSError:
        with suppress(OSError):
            scratch.unlink()
