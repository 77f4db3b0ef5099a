"""Whether there is room for the next chunk: what is asked, how often, and what is said."""

from __future__ import annotations

import pytest

from tidekv_cli.room import Room

MIB = 1 << 20


def test_room_and_shortage() -> None:
    left = [500 * MIB]
    room = Room(lambda: left[0], 400 * MIB, 512)
    assert room.shortage(512) is None
    left[0] = 300 * MIB
    assert Room(lambda: left[0], 400 * MIB, 512).shortage(256) is None
    said = Room(lambda: left[0], 400 * MIB, 512).shortage(512)
    assert said == "300.0 MiB are available, a chunk of 512 tokens needs 432.0 MiB"


def test_what_cannot_be_read_is_no_shortage() -> None:
    assert Room(lambda: None, 1 << 50, 1).shortage(1) is None


def test_memory_is_not_read_for_every_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, reads = [0.0], []
    monkeypatch.setattr("tidekv_cli.room.time.monotonic", lambda: clock[0])

    def read() -> int:
        reads.append(clock[0])
        return 1 << 40

    room = Room(read, MIB, 512)
    for step in range(30):
        clock[0] = step / 100
        assert room.shortage(512) is None
    assert len(reads) == 3
    room.shortage(256)  # another size is another question
    assert len(reads) == 4


def test_a_shortage_is_asked_again_at_once() -> None:
    left = [0, 0, 1 << 40]
    room = Room(lambda: left.pop(0), MIB, 512)
    assert room.shortage(512) and room.shortage(256) and room.shortage(256) is None
