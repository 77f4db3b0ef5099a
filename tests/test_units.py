"""Amounts of memory as people write them."""

from __future__ import annotations

import pytest

from tidekv_cli.errors import UsageError
from tidekv_cli.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("1", 1),
        ("123456789", 123456789),
        ("7b", 7),
        ("7 B", 7),
        ("1k", 1024),
        ("1K", 1024),
        ("1KiB", 1024),
        ("1kb", 1000),
        ("512MiB", 512 << 20),
        ("500MB", 500_000_000),
        ("6G", 6 << 30),
        ("6GiB", 6 << 30),
        ("6 gib", 6 << 30),
        ("6GB", 6_000_000_000),
        ("1.5G", 3 << 29),
        ("0.5 TiB", 1 << 39),
        ("2tb", 2_000_000_000_000),
        ("  3M  ", 3 << 20),
        ("1.5", 1),
    ],
)
def test_amounts(text: str, expected: int) -> None:
    assert parse_bytes(text, "--memory-limit") == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "G",
        "-1",
        "+1",
        "1,5G",
        "1e9",
        "1..5",
        ".5G",
        "6Gx",
        "6 GiB more",
        "0x10",
        "nan",
        "inf",
        "1P",
        "½G",
        "9" * 400,
        "9" * 5000,
        "1." + "0" * 30,
    ],
)
def test_no_amounts(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_bytes(text, "--memory-limit")
    assert "--memory-limit" in caught.value.message and repr(text) in caught.value.message
    assert "GiB" in caught.value.hint


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (None, "unknown"),
        (0, "0.0 MiB"),
        (1 << 20, "1.0 MiB"),
        (768 << 20, "768.0 MiB"),
        (-(5 << 20), "-5.0 MiB"),
        (1 << 30, "1.000 GiB"),
        (3 << 29, "1.500 GiB"),
        (-(2 << 30), "-2.000 GiB"),
        (5 << 40, "5120.000 GiB"),
    ],
)
def test_formatting(count: int | None, expected: str) -> None:
    assert format_bytes(count) == expected


@pytest.mark.parametrize("count", [0, 1 << 20, 3 << 27, 1 << 30, 5 << 29, 1 << 40])
def test_what_is_written_can_be_read(count: int) -> None:
    assert parse_bytes(format_bytes(count), "it") == count
