"""Settings -> bytes at any length, headroom, the largest context. Plain arithmetic on shapes; no torch.

Weights, cache, bridge and active KV are exact. Workspace and scoring are upper bounds on what lives beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tidekv_cli.methods import Method
from tidekv_cli.model_spec import ModelSpec

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_SMALL_CHUNK, _SMALL_BUDGET = 256, 256
_TILE = 64  # scoring rounds key blocks up to whole tiles


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """Everything that changes memory, in tokens; `budget_tokens` None keeps all. `window` is the selector's W.

    `record_kept` holds every layer's kept positions to the end.
    """

    spec: ModelSpec
    method: Method
    dtype: str
    chunk_size: int
    score_block: int
    budget_tokens: int | None
    window: int
    max_new_tokens: int
    attention: str
    reserve_items: Mapping[str, int]
    free_bytes: int | None
    record_kept: bool = False


@dataclass(frozen=True, slots=True)
class PlannedBytes:
    """Bytes by item at one prompt length; `peak` is their sum."""

    weights: int
    cache: int
    bridge: int
    active_kv: int
    workspace: int
    scoring: int
    reserve: int

    @property
    def peak(self) -> int:
        """All items at once: an upper bound, since the chunk's workspace and scoring do not overlap."""
        parts = (self.weights, self.cache, self.bridge, self.active_kv, self.workspace, self.scoring)
        return sum(parts) + self.reserve


@dataclass(frozen=True, slots=True)
class Plan:
    """What is going to be done to a prompt of `prompt_tokens`, and what it takes."""

    settings: PlanSettings
    prompt_tokens: int
    bytes: PlannedBytes
    memory_prompt_tokens: int | None

    @property
    def headroom_bytes(self) -> int | None:
        """Free memory less the peak; None where free memory is unknown."""
        free = self.settings.free_bytes
        return None if free is None else free - self.bytes.peak

    @property
    def fits(self) -> bool:
        """Whether the peak is within free memory, as far as that is known."""
        return self.headroom_bytes is None or self.headroom_bytes >= 0

    @property
    def max_context_tokens(self) -> int | None:
        """The most tokens, prompt and new ones together, that fit the memory and the model's window."""
        known = [n for n in (self.memory_context_tokens, self.settings.spec.context_window) if n is not None]
        return min(known, default=None)

    @property
    def memory_context_tokens(self) -> int | None:
        """The same by memory alone; 0 where not even a prompt of one token fits."""
        prompt = self.memory_prompt_tokens
        return prompt if not prompt else prompt + self.settings.max_new_tokens


def make_plan(settings: PlanSettings, prompt_tokens: int) -> Plan:
    """The plan for a prompt of `prompt_tokens`."""
    return Plan(settings, prompt_tokens, planned_bytes(settings, prompt_tokens), largest_prompt(settings))


def largest_prompt(settings: PlanSettings) -> int | None:
    """The longest prompt whose peak is within free memory, 0 if none is; None where free memory is unknown."""
    if settings.free_bytes is None:
        return None
    low, high = 0, 1
    while planned_bytes(settings, high).peak <= settings.free_bytes and high < 1 << 40:
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        if planned_bytes(settings, middle).peak <= settings.free_bytes:
            low = middle
        else:
            high = middle
    return low


def largest_budget(settings: PlanSettings, prompt_tokens: int) -> int:
    """The largest budget, at most the whole prompt, at which the prompt fits; 0 if none does."""
    low, high = 0, prompt_tokens + 1
    while high - low > 1:
        middle = (low + high) // 2
        trial = replace(settings, budget_tokens=middle)
        if settings.free_bytes is None or planned_bytes(trial, prompt_tokens).peak <= settings.free_bytes:
            low = middle
        else:
            high = middle
    return low


def best_change(settings: PlanSettings, prompt_tokens: int) -> tuple[str, int]:
    """The one flag that lowers the peak of this prompt most, and the peak in bytes that it gives."""
    changes = {
        "--schedule tide": replace(settings, method=replace(settings.method, schedule="tide")),
        "--dtype bfloat16": replace(settings, dtype="bfloat16"),
        f"--chunk-size {_SMALL_CHUNK}": replace(settings, chunk_size=min(settings.chunk_size, _SMALL_CHUNK)),
        f"--budget {_SMALL_BUDGET}": replace(
            settings, budget_tokens=min(settings.budget_tokens or prompt_tokens, _SMALL_BUDGET)
        ),
    }
    if not settings.window:  # what keeps everything has no budget
        changes = {flag: changed for flag, changed in changes.items() if settings.budget_tokens or "budget" not in flag}
    peaks = {flag: planned_bytes(changed, prompt_tokens).peak for flag, changed in changes.items()}
    flag = min(peaks, key=lambda name: peaks[name])
    return flag, peaks[flag]


def planned_bytes(settings: PlanSettings, length: int) -> PlannedBytes:
    """Bytes by item for a prompt of `length` tokens."""
    spec, item = settings.spec, ITEM_BYTES[settings.dtype]
    row = 2 * spec.kv_heads * spec.head_dim * item  # one token's K and V in one layer
    kept = length if settings.budget_tokens is None else min(settings.budget_tokens, length)
    return PlannedBytes(
        weights=spec.parameters * item,
        cache=spec.layers * ((kept + settings.max_new_tokens) * row + settings.record_kept * spec.kv_heads * kept * 8),
        bridge=length * spec.hidden_size * item,
        active_kv=length * row,
        workspace=_workspace(settings, length),
        scoring=_scoring(settings, length, kept),
        reserve=sum(settings.reserve_items.values()),
    )


def _workspace(settings: PlanSettings, length: int) -> int:
    """Activations of one chunk, at most: the larger of attention and MLP, and the logits of one token."""
    spec, item = settings.spec, ITEM_BYTES[settings.dtype]
    whole = settings.method.schedule == "oneshot"
    rows = length if whole else min(settings.chunk_size, length)
    query, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    widened = 8 if item < 4 else 0  # norms and merged attention are formed in float32
    hidden = spec.hidden_size * (3 * item + widened)
    mlp = hidden + 3 * spec.intermediate_size * item
    attention = hidden + 5 * query * item + 4 * kv * item + query * widened + 12 * spec.heads
    if settings.attention == "eager":  # the full matrix of logits, its exponential and its mask; float32 K and V
        attention += 13 * spec.heads * length + (8 * kv + 16) * length // rows + 12 * query
    tables = 2 * spec.head_dim * (item + 8) + 16
    # In a whole-prompt layer K and V live beside the queries but the MLP runs after they are gone.
    return rows * (max(mlp, attention) + tables) + spec.vocab_size * (item + 8) + spec.hidden_size * 16


def _scoring(settings: PlanSettings, length: int, kept: int) -> int:
    """Window queries, one block of logits, and the running top-k, at most."""
    if not settings.window:
        return 0
    spec, window = settings.spec, settings.window
    block = -(-min(settings.score_block, length) // _TILE) * _TILE
    queries = spec.heads * window * (3 * spec.head_dim + 2) * 4
    logits = spec.heads * window * block * 4
    keys = 2 * spec.kv_heads * block * spec.head_dim * 4
    ranked = spec.kv_heads * (kept + 3 * block) * 64  # two blocks wait for the choice while the third comes
    return queries + logits + keys + ranked
