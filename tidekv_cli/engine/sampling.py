"""How the next token is chosen: validated settings. No torch, so that bad values are refused before it is imported."""

from __future__ import annotations

from dataclasses import dataclass

from tidekv_cli.errors import UsageError


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """Greedy at temperature 0; otherwise nucleus sampling from the smallest set with mass `top_p`."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None

    @property
    def ignored(self) -> tuple[str, ...]:
        """Flags that change nothing, since a greedy choice draws nothing."""
        given = {"--top-p": self.top_p != 1.0, "--seed": self.seed is not None}
        return tuple(flag for flag, is_given in given.items() if is_given and self.temperature == 0.0)

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise UsageError(f"--temperature {self.temperature} is impossible", "use 0 (greedy) or a positive number")
        if not 0.0 < self.top_p <= 1.0:
            raise UsageError(f"--top-p {self.top_p} is impossible", "use a number above 0 and at most 1")
        if self.seed is not None and type(self.seed) is not int:
            raise UsageError(f"--seed {self.seed} is impossible", "use a whole number")
        if self.seed is not None and not -(1 << 63) <= self.seed < 1 << 63:
            raise UsageError(f"--seed {self.seed} is impossible", "use a 64-bit number")
