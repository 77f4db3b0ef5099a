"""What to do when memory runs out: tell it from other failures, and give back what is not used. Knows no schedule."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from typing import TypeVar

import torch

from tidekv_cli.errors import is_out_of_memory

_Result = TypeVar("_Result")


def attempt(step: Callable[[], _Result]) -> tuple[_Result | None, str | None]:
    """What `step` returns, and None; or None, and what was said when memory ran out.

    The exception is gone on return, and with it what its frames held.
    """
    try:
        return step(), None
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None, (str(error).splitlines() or ["memory ran out"])[0]


def lacking(shortage: Callable[[int], str | None], tokens: int, device: torch.device) -> str | None:
    """Why there is no room for so many tokens, asked again once what nothing uses is given back; None if there is."""
    found = shortage(tokens)
    if found is not None:
        release_unused(device)
        found = shortage(tokens)
    return found


def restart_device_peaks(device: torch.device) -> None:
    """Peaks of a CUDA device begin again at what is held."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def device_peaks(address: str) -> tuple[int | None, int | None]:
    """Most bytes that torch has had in tensors, and reserved for them, on a CUDA device; None on a CPU."""
    device = torch.device(address)
    if device.type != "cuda":
        return None, None
    return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)


def unused_bytes(device: torch.device) -> int:
    """What torch holds of a CUDA device's memory without a tensor in it; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def release_unused(device: torch.device) -> None:
    """Give memory that nothing uses back to the device, or on a CPU to the system."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
        if trim is not None:
            trim(0)
