"""Bytes by item and phase at any prompt length: a few lengths simulated, kept on disk, and straight lines through them.

At fixed settings each phase's peak is affine in the length S once S is past the budget, the blocks that wait for the
top-k, and three chunks; below that the length itself is simulated. Imports torch only for a length not simulated yet.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidekv_cli.plan import PlanSettings

_FORMAT = 1
_CUDA_GRANULARITY = 512  # torch's CUDA allocator rounds each block up to it
_ONESHOT_STEP = 256
_OTHER_STORAGES = 64
_ITEMS = ("workspace", "weights", "cache", "bridge", "active_kv", "scoring")  # as the engine's ledger calls them
Phases = list[dict[str, int]]


class MemoryModel:
    """Live bytes, weights left out, of one set of settings; each phase's items are those at its own peak."""

    def __init__(self, settings: PlanSettings, directory: Path | None) -> None:
        """`directory` keeps what was simulated; None keeps it for this object only."""
        self._settings = settings
        self._file = None if directory is None else directory / f"{_key(settings)}.json"
        self._samples: dict[int, Phases] = {} if self._file is None else _read(self._file)

    def peak(self, length: int) -> dict[str, int]:
        """Bytes by item at the highest moment of a prompt of `length` tokens, from the lines."""
        items = _highest(self.phases(length))
        if self._granularity > 1:  # between two lengths each storage may round up to one block more
            items["workspace"] += self._granularity * (2 * self._settings.spec.layers + _OTHER_STORAGES)
        return items

    def simulated(self, length: int) -> dict[str, int]:
        """The same, simulated at this very length."""
        return _highest(self._sampled(length))

    def phases(self, length: int) -> Phases:
        """Bytes by item at the peak of each of `simulate`'s phases."""
        start, step = self.regime(length)
        if length <= start:
            return self._sampled(length)
        samples = [self._sampled(start + number * step) for number in range(self._degree + 1)]
        return [
            {item: _extrapolated([sample[item] for sample in phase], length - start, step) for item in phase[0]}
            for phase in zip(*samples, strict=True)
        ]

    def regime(self, length: int) -> tuple[int, int]:
        """Where the lines begin, and how far apart the lengths are that they go through."""
        settings = self._settings
        step = _ONESHOT_STEP if self._whole else settings.chunk_size
        # The top-k holds two blocks beside its best, and its positions when a whole block comes after the first choice.
        waiting = 4 * settings.score_block if settings.window else 0
        start = (settings.budget_tokens or 0) + waiting + settings.window + 3 * step
        # A matrix of logits grows with the keys of the last whole chunk, so it has a line for each remainder.
        remainder = length if settings.attention == "eager" else 0
        return start + (remainder - start) % step, step

    @property
    def _granularity(self) -> int:
        return 1 if self._settings.device_kind == "cpu" else _CUDA_GRANULARITY

    @property
    def _whole(self) -> bool:
        return self._settings.method.schedule == "oneshot"

    @property
    def _degree(self) -> int:
        """2 where all logits of the prompt exist at once, else 1."""
        return 2 if self._whole and self._settings.attention == "eager" else 1

    def _sampled(self, length: int) -> Phases:
        if length not in self._samples:
            from tidekv_cli.simulate import simulate

            self._samples[length] = simulate(self._settings, length, self._granularity)
            if self._file is not None:
                _write(self._file, self._samples)
        return self._samples[length]


def _highest(phases: Phases) -> dict[str, int]:
    totals = [sum(items.values()) for items in phases]
    return dict(phases[totals.index(max(totals))])


def _extrapolated(values: Sequence[int], ahead: int, step: int) -> int:
    """The line, or parabola, through `values` at 0, `step` and 2 `step`, at `ahead`, rounded up."""
    first = values[1] - values[0]  # Newton's forward differences
    second = values[2] - values[1] - first if len(values) > 2 else 0
    scaled = 2 * step * step * values[0] + 2 * step * first * ahead + second * ahead * (ahead - step)
    return -(-scaled // (2 * step * step))


def _key(settings: PlanSettings) -> str:
    """Of everything that changes a simulated figure."""
    values: dict[str, Any] = {
        "format": _FORMAT,
        "versions": [version(name) for name in ("torch", "transformers")],
        "engine": _engine_digest(),
        "config": dict(settings.config),
        "method": [settings.method.schedule, settings.method.selector, settings.method.budget_policy],
        "store": settings.method.kv_store,
        "selector": dict(settings.selector_settings),
        "sizes": [settings.chunk_size, settings.score_block, settings.budget_tokens, settings.max_new_tokens],
        "how": [settings.dtype, settings.attention, settings.device_kind, settings.record_kept],
    }
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:32]


@cache
def _engine_digest() -> str:
    """Of the sources that a simulation runs: another engine takes other bytes."""
    package = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted([*(package / "engine").rglob("*.py"), package / "simulate.py", package / "assembly.py"]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _read(file: Path) -> dict[int, Phases]:
    """What an earlier process simulated; a damaged file is as good as none."""
    try:
        samples = {int(length): phases for length, phases in json.loads(file.read_text(encoding="utf-8")).items()}
        whole = all(phases and all(_is_phase(phase) for phase in phases) for phases in samples.values())
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
    return samples if whole else {}


def _is_phase(phase: Any) -> bool:
    return set(phase) == set(_ITEMS) and all(type(phase[item]) is int for item in _ITEMS)


def _write(file: Path, samples: dict[int, Phases]) -> None:
    """In one step; where there is no place to write, the next process simulates again."""
    scratch = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(json.dumps(samples), encoding="utf-8")
        os.replace(scratch, file)
    except OSError:
        return
