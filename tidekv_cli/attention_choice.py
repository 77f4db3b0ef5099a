"""Which attention backend is used: in the wished order the first that fits the model and works. Imports no torch
unless one has to be tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tidekv_cli.engine.kernel_limits import HEAD_DIM_STEP, MOST_HEAD_DIM
from tidekv_cli.errors import DeviceError, UsageError
from tidekv_cli.model_spec import ModelSpec
from tidekv_cli.profile import ATTENTION, CPU_ATTENTION, Profile

# torch's own kernels, the best first: where `sdpa` is wanted and refuses, another of them is taken.
_TORCH = ("sdpa", "efficient", "math")
_HALVES = ("bfloat16", "float16")
_NOT_INSTALLED = "No module named 'flash_attn'"
# Why a backend cannot be used, None if it can.
Trial = Callable[[str], str | None]


@dataclass(frozen=True, slots=True)
class ChosenAttention:
    """The backend's name, and what to tell of those that were wanted more."""

    name: str
    warnings: tuple[str, ...] = ()


def wished_attention(value: str, profile: Profile, device_kind: str) -> tuple[str, ...]:
    """The names to try, in their order, for `--attention VALUE`. Raises `UsageError` for what the device never has."""
    if value not in ("auto", *ATTENTION):
        raise UsageError(f"--attention {value} is not known", f"use auto, {', '.join(ATTENTION)}")
    if value != "auto" and device_kind == "cpu" and value not in CPU_ATTENTION:
        raise UsageError(
            f"--attention {value} needs a CUDA device", f"use --attention auto, {', '.join(CPU_ATTENTION)}"
        )
    wanted = profile.attention if value == "auto" else (value,)
    usable = [name for name in wanted if device_kind != "cpu" or name in CPU_ATTENTION]
    if not usable:
        raise UsageError(
            f"the profile {profile.name} has no attention that device {device_kind} can do", "use --attention sdpa"
        )
    if value == "flash-attn":
        usable.append("sdpa")
    fallbacks = [also for name in usable for also in (_TORCH[_TORCH.index(name) :] if name in _TORCH else (name,))]
    return tuple(name for name in dict.fromkeys(fallbacks) if device_kind != "cpu" or name in CPU_ATTENTION)


def choose_attention(
    wished: Sequence[str], wanted: str, device_kind: str, dtype: str, spec: ModelSpec, trial: Trial
) -> ChosenAttention:
    """The first of `wished` that fits and passes its trial; `wanted` is what the user said.

    Raises `DeviceError` if there is none.
    """
    refusals: list[tuple[str, str]] = []
    for name in wished:
        reason = _misfit(name, device_kind, dtype, spec) or trial(name)
        if reason is None:
            told = [(other, why) for other, why in refusals if wanted != "auto" or why != _NOT_INSTALLED]
            warnings = [f"attention {other} is not used: {why}; {name} is" for other, why in told]
            return ChosenAttention(name, (*warnings, *_partly(name, device_kind, spec)))
        refusals.append((name, reason))
    reasons = "; ".join(f"{name}: {why}" for name, why in refusals)
    raise DeviceError(f"no attention works on this device: {reasons}", "use --device cpu, or another --attention")


def _partly(name: str, device_kind: str, spec: ModelSpec) -> Iterator[str]:
    """Which layers the chosen backend's kernel does not do, so that they take more time and memory."""
    if device_kind == "cpu" or name not in ("flash-attn", "sdpa", "efficient"):
        return
    if spec.traits.softcap and name != "flash-attn":
        yield f"attention {name} has no soft-cap: the model's layers are computed some rows at a time without a kernel"
    if spec.traits.widest_head > MOST_HEAD_DIM and name != "efficient":
        yield f"attention {name} takes heads of at most {MOST_HEAD_DIM}: layers with wider ones do without a kernel"


def _misfit(name: str, device_kind: str, dtype: str, spec: ModelSpec) -> str | None:
    """Why a backend's kernel refuses the model's shapes or dtype, as far as that is known beforehand."""
    if device_kind == "cpu" or name not in ("flash-attn", "sdpa", "efficient"):
        return None
    if name != "efficient" and dtype not in _HALVES:
        return f"it computes in {' and '.join(_HALVES)}, not {dtype}"
    if spec.head_dim % HEAD_DIM_STEP:
        return f"its heads have a multiple of {HEAD_DIM_STEP} numbers, not {spec.head_dim}"
    if name != "efficient" and spec.head_dim > MOST_HEAD_DIM:
        return f"its heads have at most {MOST_HEAD_DIM} numbers, not {spec.head_dim}"
    return None
