"""What a plan is made for. Computes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tidekv_cli.axes import Value
from tidekv_cli.methods import Method
from tidekv_cli.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device moves and computes at most; None where it is not known."""

    bandwidth_gb_s: float | None = None
    tflops: float | None = None


NO_RATES = Rates()


@dataclass(frozen=True, slots=True)
class Regimes:
    """Memory is a straight line over the length between one of `windows`, in tokens, and the next.

    It is none anywhere if it `bends`, because a matrix of logits grows with the keys of each chunk. `rows` are the most
    that a layer keeps of a long prompt, where there is a budget, and that are looked at at a time; the cache
    grows by `step` rows.
    """

    windows: tuple[int, ...]
    bends: bool
    rows: int = 0
    step: int = 1


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """Everything that changes memory, in tokens; `budget_tokens` None keeps all. `config` is a Hugging Face config.

    `axis_settings` are the parameters of all axes. What the selector says of itself with them: `window` is its
    observation window, 0 if it has none, `mandatory_tokens` what it always keeps, `slots` whether places in the cache
    count as positions. `record_kept` holds every layer's kept positions to the end. `rates` change time estimates only.
    """

    spec: ModelSpec
    method: Method
    dtype: str
    chunk_size: int
    score_block: int
    budget_tokens: int | None
    axis_settings: Mapping[str, Value]
    window: int
    mandatory_tokens: int
    slots: bool
    max_new_tokens: int
    attention: str
    reserve_items: Mapping[str, int]
    free_bytes: int | None
    config: Mapping[str, Any]
    device_kind: str = "cpu"
    record_kept: bool = False
    rates: Rates = NO_RATES

    @property
    def context_limit(self) -> int | None:
        """Tokens of prompt and answer that the model's window allows; None where there is no limit.

        Where places in the cache count as positions and there are no more of them than that, new tokens take none, and
        neither does what a schedule evicts as it reads.
        """
        window = self.spec.context_window
        held = self.budget_tokens
        if window is None or not self.slots or held is None or held > window:
            return window
        return None if self.method.schedule == "online" else window + self.max_new_tokens

    @property
    def token_major(self) -> bool:
        """Whether a chunk goes through all layers before the next one does, so that all of them hold a cache."""
        return self.method.schedule in ("chunked", "online")

    @property
    def device_type(self) -> str:
        """What torch calls the device: `cpu` or `cuda`."""
        return "cpu" if self.device_kind == "cpu" else "cuda"
