"""The exception tree, the exit codes."""

from __future__ import annotations

import errno
from types import SimpleNamespace

import pytest

from tidekv_cli import errors
from tidekv_cli.errors import ExitCode, TideError, is_out_of_memory

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, TideError)]


def test_each_kind_has_a_code_and_a_name_of_its_own() -> None:
    assert len({kind.code for kind in KINDS}) == len({kind.kind for kind in KINDS}) == len(KINDS) == 9
    assert {kind.code for kind in KINDS} == set(ExitCode) - {ExitCode.DONE, ExitCode.CLOSED_PIPE}


@pytest.mark.parametrize("kind", KINDS)
def test_message_and_hint_are_one_line_each(kind: type[TideError]) -> None:
    error = kind("first\nsecond\t third ", " do\r\nthis ")
    assert (error.message, error.hint) == ("first second third", "do this")
    assert isinstance(error, Exception) and "first" in str(error)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"),
            True,
        ),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 4 bytes."), True),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.ENOENT, "No such file"), False),
        (RuntimeError("more than one element of the written-to tensor refers to a single memory location"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_out_of_memory_is_told_from_bugs(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


@pytest.mark.parametrize("said", ["CUDA driver error: device not ready", "!handles_.at(i) INTERNAL ASSERT FAILED"])
def test_what_a_jetson_says_counts_when_memory_is_short(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for available, expected in ((100, True), (600, False)):
        figures = SimpleNamespace(total=1000, available=available)
        monkeypatch.setattr("psutil.virtual_memory", lambda figures=figures: figures)
        assert is_out_of_memory(RuntimeError(said)) is expected

    def unreadable() -> None:
        raise OSError

    monkeypatch.setattr("psutil.virtual_memory", unreadable)
    assert is_out_of_memory(RuntimeError(said))
