"""The one exception tree and the one list of exit codes. Knows nothing of any other module."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

_OUT_OF_MEMORY = (
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "out of memory",
    "alloc_failed",  # cuBLAS
    "bad_alloc",
    "bad allocation",
    "could not create a memory object",  # oneDNN
)
# What a Jetson says when its memory ran out, and at other times too.
_PERHAPS_OUT_OF_MEMORY = (
    "nvml_success == r internal assert failed",
    "!handles_.at(i) internal assert failed",
    "cuda driver error: device not ready",
)


class ExitCode(IntEnum):
    """What the process returns; the README's table says the same."""

    DONE = 0
    BUG = 1
    USAGE = 2
    MODEL = 3
    DOES_NOT_FIT = 4
    WINDOW = 5
    INPUT = 6
    OUT_OF_MEMORY = 7
    DEVICE = 8
    INTERRUPTED = 130
    CLOSED_PIPE = 141


class TideError(Exception):
    """An expected failure: one message (what, the value, the limit) and one hint (the way out)."""

    code = ExitCode.BUG
    kind = "unexpected"

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message = " ".join(message.split())
        self.hint = " ".join(hint.split())


class UsageError(TideError):
    """A flag, value or combination that cannot be meant."""

    code = ExitCode.USAGE
    kind = "usage"


class ModelError(TideError):
    """A model that is missing, damaged or of a kind that is not supported."""

    code = ExitCode.MODEL
    kind = "model"


class DoesNotFitError(TideError):
    """The plan's peak exceeds the memory; nothing was loaded."""

    code = ExitCode.DOES_NOT_FIT
    kind = "does_not_fit"


class WindowError(TideError):
    """Prompt and new tokens exceed the model's context window."""

    code = ExitCode.WINDOW
    kind = "window"


class InputError(TideError):
    """A document that cannot be read, or holds nothing."""

    code = ExitCode.INPUT
    kind = "input"


class MemoryExhaustedError(TideError):
    """Memory ran out at run time."""

    code = ExitCode.OUT_OF_MEMORY
    kind = "out_of_memory"


class Interrupted(TideError):
    """Ctrl-C before there was anything to show."""

    code = ExitCode.INTERRUPTED
    kind = "interrupted"


class DeviceError(TideError):
    """The device asked for is not there or not usable."""

    code = ExitCode.DEVICE
    kind = "device"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` is Python's or torch's way to say that an allocation failed.

    What may mean that or another fault is taken for it when the machine's memory is short.
    """
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    said = str(error).lower()
    if isinstance(error, ImportError):
        return "failed to map segment" in said or "cannot allocate memory" in said
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError)
        and (
            any(words in said for words in _OUT_OF_MEMORY)
            or (any(words in said for words in _PERHAPS_OUT_OF_MEMORY) and memory_is_short())
        )
    )


def memory_is_short() -> bool:
    """Whether less than an eighth of the machine's memory can be had; so too where that cannot be read."""
    import psutil

    try:
        memory = psutil.virtual_memory()
    except (OSError, RuntimeError):
        return True
    return bool(memory.available < memory.total // 8)


def error_of(code: int, message: str, hint: str) -> TideError:
    """The error of exit code `code`, as another process told it."""
    kinds: tuple[type[TideError], ...] = (*TideError.__subclasses__(), TideError)
    return next(kind for kind in kinds if kind.code == code)(message, hint)


@contextmanager
def damage_named(what: str) -> Iterator[None]:
    """The libraries that read models raise a dozen kinds for one damaged file; each becomes a `ModelError`."""
    try:
        yield
    except TideError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(f"{what}: {error}", "fetch or copy it again") from error
