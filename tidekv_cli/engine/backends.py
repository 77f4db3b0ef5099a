"""Attention backends by name: the one for a device, its stand-in for simulation, and whether one works here."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from tidekv_cli.engine.attention import PLAIN, Attention, Eager, Math, Rule
from tidekv_cli.engine.flash_cpu import FlashCPU
from tidekv_cli.engine.flash_cuda import (
    Efficient,
    Flash,
    allocating_efficient,
    allocating_flash,
    efficient_kernel,
    package_kernel,
    torch_kernel,
)
from tidekv_cli.engine.masks import Visible
from tidekv_cli.errors import UsageError, is_out_of_memory

_ANYWHERE: dict[str, Attention] = {"math": Math(), "eager": Eager()}
_CPU: dict[str, Attention] = {"sdpa": FlashCPU(), **_ANYWHERE}
_CUDA: dict[str, Attention] = {
    "flash-attn": Flash("flash-attn", package_kernel, caps=True),
    "sdpa": Flash("sdpa", torch_kernel, caps=False),
    "efficient": Efficient(efficient_kernel),
    **_ANYWHERE,
}
_SIMULATED_CUDA: dict[str, Attention] = {
    "flash-attn": Flash("flash-attn", allocating_flash, caps=True),
    "sdpa": Flash("sdpa", allocating_flash, caps=False),
    "efficient": Efficient(allocating_efficient),
    **_ANYWHERE,
}
# Kernels round a product of half-precision numbers to their dtype.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}
_KEYS, _WINDOW, _SOFTCAP = 40, 5, 2.0


def attention_backend(name: str, device_type: str) -> Attention:
    """The backend called `name` on devices of torch's `device_type`. Raises `UsageError` where there is none."""
    return _by_name(_CPU if device_type == "cpu" else _CUDA, name, device_type)


def simulated_backend(name: str, device_type: str) -> Attention:
    """What allocates as that backend does, on fake tensors of the CPU."""
    return _by_name(_CPU if device_type == "cpu" else _SIMULATED_CUDA, name, device_type)


def _by_name(backends: dict[str, Attention], name: str, device_type: str) -> Attention:
    if name not in backends:
        raise UsageError(f"--attention {name} is not available on device {device_type}", f"use {', '.join(backends)}")
    return backends[name]


def failure(
    backend: Attention, device: torch.device, dtype: torch.dtype, heads: tuple[int, int, int], softcap: bool = False
) -> str | None:
    """Why `backend` cannot be used, None if on a tiny input it gives what plain attention does.

    `heads` is (Hq, Hkv, D). Tried are a chunk after others, a first chunk, one query, with and without a window, and if
    need be a soft-cap.
    """
    rules = [PLAIN, Rule(Visible(_WINDOW)), *([Rule(softcap=_SOFTCAP)] if softcap else [])]
    try:
        for rows, rule in product((17, 1, _KEYS), rules):
            difference = _difference(backend, device, dtype, heads, rows, rule)
            if not difference <= _TOLERANCE[dtype]:  # NaN is not
                return f"its result is off by {difference:.2g}"
    except Exception as error:  # a kernel of another version may raise anything
        if is_out_of_memory(error):
            raise
        return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    return None


def _difference(
    backend: Attention,
    device: torch.device,
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    rows: int,
    rule: Rule,
) -> float:
    """The greatest difference of outputs and LSE from plain attention in float32 on the CPU."""
    query_heads, kv_heads, size = heads
    draw = torch.Generator().manual_seed(rows)

    def drawn(count: int, length: int) -> Tensor:
        return torch.randn(1, count, length, size, generator=draw).to(dtype)

    queries, keys, values = drawn(query_heads, rows), drawn(kv_heads, _KEYS), drawn(kv_heads, _KEYS)
    scale = size**-0.5
    found = backend.attend(queries.to(device), keys.to(device), values.to(device), scale, rule)
    expected = Eager().attend(queries.float(), keys.float(), values.float(), scale, rule)
    return max(float((a.float().cpu() - b).abs().max()) for a, b in zip(found, expected, strict=True))
