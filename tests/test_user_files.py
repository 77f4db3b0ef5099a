"""Whatever a YAML file or a path holds, it ends in a value or a named error."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidekv_cli.errors import UsageError
from tidekv_cli.user_files import read_yaml_mapping, user_path


def read(path: Path, content: bytes) -> object:
    path.write_bytes(content)
    return read_yaml_mapping(path, "the thing")


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b"", {}), (b"# nothing\n", {}), (b"null", {}), (b"{}", {}), (b"a: 1\nb: [x]\n", {"a": 1, "b": ["x"]})],
)
def test_mappings(tmp_path: Path, content: bytes, expected: dict[str, object]) -> None:
    assert read(tmp_path / "file.yaml", content) == expected


@pytest.mark.parametrize(
    "content",
    [
        b"a: 2020-13-45",
        b"a: 0b_",
        b"a: " + b"9" * 5000,
        b"a: " + b"[" * 3000,
        b"a: \xff",
        b"a: [1",
        b"!!python/object:os.x {}",
    ],
)
def test_no_yaml(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(UsageError, match=r"the thing .*file\.yaml is no valid YAML"):
        read(tmp_path / "file.yaml", content)


@pytest.mark.parametrize("content", [b"[]", b"0", b"false", b"text", b"- a"])
def test_no_mapping(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(UsageError, match="is no mapping"):
        read(tmp_path / "file.yaml", content)


@pytest.mark.parametrize("name", ["missing.yaml", "x" * 5000, "."])
def test_what_cannot_be_read(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"the thing .* cannot be read"):
        read_yaml_mapping(tmp_path / name, "the thing")


def test_home_directories() -> None:
    assert user_path("~/x") == Path.home() / "x"
    assert user_path("~nosuchuser/x") == Path("~nosuchuser/x")
    assert user_path("plain") == Path("plain")
