"""Bytes and counts as people write them. Knows nothing else."""

from __future__ import annotations

import re

from tidekv_cli.errors import UsageError

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}  # of one number
_FACTORS = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base ** (power + 1)
    for power, letter in enumerate("kmgt")
    for suffix, base in (("", 1024), ("ib", 1024), ("b", 1000))
}


def parse_bytes(text: str, what: str) -> int:
    """`6GiB`, `6G`, `500MB` or a plain number, in bytes. Raises `UsageError` naming `what`."""
    match = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([a-zA-Z]*)\s*", str(text))
    factor = _FACTORS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise UsageError(f"{what} {text!r} is no amount of memory", "write it like 6GiB or 512MiB")
    return int(float(match[1]) * factor)


def format_bytes(count: int | None) -> str:
    """In MiB below 1 GiB, in GiB above; `unknown` for None."""
    if count is None:
        return "unknown"
    if abs(count) < 1 << 30:
        return f"{count / (1 << 20):.1f} MiB"
    return f"{count / (1 << 30):.3f} GiB"
