"""The largest context that fits, and what given contexts take. Plans only; runs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tidekv_cli.plan import Plan, PlannedBytes, Planner

_SHORTEST_ROW = 8192


@dataclass(frozen=True, slots=True)
class Row:
    """One context of `context_tokens`, prompt and new tokens together; measured after a real run only.

    `failure` is what was said where the real run found too little memory.
    """

    context_tokens: int
    fits: bool
    within_window: bool
    bytes: PlannedBytes
    headroom_bytes: int | None
    measured_peak_bytes: int | None = None
    process_peak_bytes: int | None = None
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class Capacity:
    """The plan of the largest context, and a row for each context asked about."""

    plan: Plan
    rows: tuple[Row, ...]

    @property
    def limited_by(self) -> str | None:
        """`memory` or `window`; None where neither is known."""
        most = self.plan.max_context_tokens
        if most is None:
            return None
        return "window" if most == self.plan.settings.context_limit else "memory"


def probe(planner: Planner, contexts: Sequence[int] = ()) -> Capacity:
    """The largest context, and a row for each of `contexts`; without any, for powers of two and the largest."""
    new = planner.settings.max_new_tokens
    longest = planner.plan(1).max_context_tokens
    plan = planner.plan(max((longest or 0) - new, 1))
    return Capacity(plan, tuple(_row(planner, context) for context in contexts or _ladder(longest)))


def _ladder(longest: int | None) -> list[int]:
    """Powers of two up to the largest context, then that."""
    most = longest or _SHORTEST_ROW
    contexts = {most, *(_SHORTEST_ROW << step for step in range(40) if _SHORTEST_ROW << step < most)}
    return sorted(contexts)


def _row(planner: Planner, context: int) -> Row:
    plan = planner.plan(max(context - planner.settings.max_new_tokens, 1))
    window = planner.settings.context_limit
    return Row(context, plan.fits, window is None or context <= window, plan.bytes, plan.headroom_bytes)
