"""The oldest versions: one list in pyproject.toml, in the constraints they are tested with, and in the table."""

from __future__ import annotations

import re

from tests.conftest import ROOT
from tidekv_cli.architectures import OLDEST, SINCE

_PIN = re.compile(r"^([\w-]+)==([\d.]+)$", re.MULTILINE)


def floors() -> dict[str, tuple[int, ...]]:
    """The least version of each dependency in pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = re.search(r"^dependencies = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert listed is not None
    return {name: numbers(least) for name, least in re.findall(r'"([\w-]+)>=([\d.]+)', listed[1])}


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def test_every_floor_is_what_the_oldest_environment_has() -> None:
    pins = dict(_PIN.findall((ROOT / "constraints-oldest.txt").read_text(encoding="utf-8")))
    found = floors()
    assert len(found) >= 12 and found.keys() <= pins.keys()
    for name, least in found.items():
        assert numbers(pins[name])[: len(least)] == least, name


def test_architectures_that_need_more_need_more_than_the_oldest() -> None:
    assert floors()["transformers"] == OLDEST
    assert all(release > OLDEST for release in SINCE.values())
