"""Paths as people write them."""

from __future__ import annotations

from pathlib import Path

from tidekv_cli.user_files import user_path


def test_home_directories() -> None:
    assert user_path("~/x") == Path.home() / "x"
    assert user_path("~nosuchuser/x") == Path("~nosuchuser/x")
    assert user_path("plain") == Path("plain")
