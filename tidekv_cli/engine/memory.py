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


def release_unused(device: torch.device) -> None:
    """Give memory that nothing uses back to the device, or on a CPU to the system."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
        if trim is not None:
            trim(0)
