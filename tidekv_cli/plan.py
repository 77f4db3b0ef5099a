"""Settings -> bytes at any length, headroom, the largest context. Imports torch only to simulate a new length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tidekv_cli.estimate import Estimate, estimate
from tidekv_cli.memory_model import MemoryModel
from tidekv_cli.plan_settings import PlanSettings

_LONGEST = 1 << 40
_FIRST_EAGER = 1024


@dataclass(frozen=True, slots=True)
class PlannedBytes:
    """Bytes by item at the highest moment of one prompt; `peak` is their sum."""

    weights: int
    cache: int
    bridge: int
    active_kv: int
    workspace: int
    scoring: int
    reserve: int

    @property
    def live(self) -> int:
        """The peak of live tensors: what can be measured tensor by tensor."""
        return self.weights + self.cache + self.bridge + self.active_kv + self.workspace + self.scoring

    @property
    def peak(self) -> int:
        """Their sum."""
        return self.live + self.reserve


@dataclass(frozen=True, slots=True)
class Plan:
    """What is going to be done to a prompt of `prompt_tokens`, and what it takes.

    `cache_bytes` is the final cache, with room for new tokens; `memory_prompt_tokens` the longest prompt that fits;
    `changes` says what was lowered to make this one fit; `full_cache_peak` is about what the peak would
    be with nothing evicted, in bytes, where that would fit too.
    """

    settings: PlanSettings
    prompt_tokens: int
    bytes: PlannedBytes
    cache_bytes: int
    memory_prompt_tokens: int | None
    changes: tuple[str, ...] = ()
    full_cache_peak: int | None = None

    @property
    def headroom_bytes(self) -> int | None:
        """Free memory less the peak; None where free memory is unknown."""
        free = self.settings.free_bytes
        return None if free is None else free - self.bytes.peak

    @property
    def estimate(self) -> Estimate:
        """The least time that it can take."""
        return estimate(self.settings, self.prompt_tokens, self.bytes.weights, self.cache_bytes)

    @property
    def fits(self) -> bool:
        """Whether the peak is within free memory, as far as that is known."""
        return self.headroom_bytes is None or self.headroom_bytes >= 0

    @property
    def max_context_tokens(self) -> int | None:
        """The most tokens, prompt and new ones together, that fit the memory and the model's window."""
        known = [n for n in (self.memory_context_tokens, self.settings.context_limit) if n is not None]
        return min(known, default=None)

    @property
    def memory_context_tokens(self) -> int | None:
        """The same by memory alone; 0 where not even a prompt of one token fits."""
        prompt = self.memory_prompt_tokens
        return prompt if not prompt else prompt + self.settings.max_new_tokens


class Planner:
    """Answers for one set of settings. `directory` keeps simulated figures for the next process (None: nowhere)."""

    def __init__(self, settings: PlanSettings, directory: Path | None = None, exact: bool = False) -> None:
        """`exact` simulates the very lengths of plans and rows; the largest prompt still comes from lines."""
        self.settings = settings
        self._model = MemoryModel(settings, directory)
        self._exact = exact

    def plan(self, prompt_tokens: int, longest: int | None = None) -> Plan:
        """The plan for a prompt of `prompt_tokens`; `longest` is the longest one that fits, where that is known."""
        model = self._model
        peak = model.simulated(prompt_tokens) if self._exact else model.peak(prompt_tokens)
        cache = model.phases(prompt_tokens)[-1]["cache"]  # the last phase is decoding
        longest = self.largest_prompt if longest is None else longest
        return Plan(self.settings, prompt_tokens, self._items(peak), cache, longest)

    @property
    def bends(self) -> bool:
        """Whether each length has to be simulated."""
        return self._model.bends

    def bytes(self, length: int) -> PlannedBytes:
        """Bytes by item at the moment of the peak for a prompt of `length` tokens, or of up to a hundredth more."""
        return self._items(self._model.peak(self._model.near(length)))

    def _items(self, peak: dict[str, int]) -> PlannedBytes:
        return PlannedBytes(**peak, reserve=sum(self.settings.reserve_items.values()))

    def headroom(self, length: int) -> int:
        """Free memory, which must be known, less the peak as `bytes` tells it."""
        free = self.settings.free_bytes
        assert free is not None
        return free - self.bytes(length).peak

    def fits(self, length: int) -> bool:
        """Whether a prompt of `length` tokens does, as far as free memory is known."""
        return self.settings.free_bytes is None or self.headroom(length) >= 0

    @cached_property
    def largest_prompt(self) -> int | None:
        """The longest prompt whose peak is within free memory, 0 if none is; None where free memory is unknown."""
        if self.settings.free_bytes is None:
            return None
        start, _ = self._model.lines
        if not self._model.bends:
            low, high = (start, _LONGEST) if self.fits(start) else (1, start)
            return last_that_fits(self.headroom, low, high) if self.fits(low) else 0
        # Each length is simulated: none longer than twice the longest that fits, or than the window.
        window = self.settings.context_limit or _LONGEST
        low, high = 1, min(_FIRST_EAGER, window)
        while high < window and self.fits(high):
            low, high = high, min(2 * high, window)
        return last_that_fits(self.headroom, low, high) if self.fits(low) else 0


def last_that_fits(headroom: Callable[[int], int], low: int, high: int, step: int = 1) -> int:
    """The largest number with no negative headroom: `high`, or a multiple of `step` below it, or `low`, which fits.

    Headroom falls as the number rises, nearly in a line.
    """
    left_low, left_high = headroom(low), headroom(high)
    if left_high >= 0:
        return high
    halve = False
    while (most := (high - 1) // step * step) > low:
        width = high - low
        guess = low + (width // 2 if halve else width * left_low // (left_low - left_high))
        guess = min(max(guess // step, low // step + 1) * step, most)
        left = headroom(guess)
        if left >= 0:
            low, left_low = guess, left
        else:
            high, left_high = guess, left
        halve = 2 * (high - low) > width  # the line was a bad guide: the next step is sure
    return low
