"""Names and sizes of the files of one commit on the hub, kept on disk once they were asked for. Asks no network.

Only they tell a directory that holds everything from one whose fetching was interrupted, or whose files another
program chose.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

Listing = dict[str, int]


def listing_file(directory: Path, repository: str, commit: str) -> Path:
    """Where the list of `commit` is kept below `directory`."""
    return directory / repository.replace("/", "--") / f"{commit}.json"


def read_listing(file: Path) -> Listing | None:
    """Bytes by name; None where no list is kept. A damaged one is as good as none."""
    try:
        sizes = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    whole = isinstance(sizes, dict) and all(type(size) is int and size >= 0 for size in sizes.values())
    return sizes if whole else None


def write_listing(file: Path, sizes: Listing) -> None:
    """In one step; where there is no place to write, the next process asks again."""
    scratch = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(json.dumps(sizes), encoding="utf-8")
        os.replace(scratch, file)
    except OSError:
        with suppress(OSError):
            scratch.unlink()
