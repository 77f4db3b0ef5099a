"""The config file and the two variables over it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidekv_cli.errors import UsageError
from tidekv_cli.settings import config_path, load_settings

EVERYTHING = """
model: org/name
device: cpu
profile: mine
method: snapkv
attention: eager
dtype: bfloat16
chunk_size: 64
score_block: 128
budget: 256
max_new_tokens: 8
"""


def write_config(base: Path, content: str | bytes) -> Path:
    path = config_path({"XDG_CONFIG_HOME": str(base)})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def assert_refused(base: Path, content: str | bytes, *words: str) -> UsageError:
    path = write_config(base, content)
    with pytest.raises(UsageError) as caught:
        load_settings({"XDG_CONFIG_HOME": str(base)})
    for word in (str(path), *words):
        assert word in caught.value.message
    assert caught.value.hint
    return caught.value


def test_where_the_file_is() -> None:
    assert config_path({"XDG_CONFIG_HOME": "/x"}) == Path("/x/tidekv/config.yaml")
    assert config_path({}) == config_path({"XDG_CONFIG_HOME": ""}) == Path.home() / ".config/tidekv/config.yaml"


def test_no_file(tmp_path: Path) -> None:
    assert load_settings({"XDG_CONFIG_HOME": str(tmp_path)}) == {}


@pytest.mark.parametrize("content", ["", "# nothing but a comment\n", "---\n", "{}"])
def test_an_empty_file(tmp_path: Path, content: str) -> None:
    write_config(tmp_path, content)
    assert load_settings({"XDG_CONFIG_HOME": str(tmp_path)}) == {}


def test_every_key(tmp_path: Path) -> None:
    write_config(tmp_path, EVERYTHING)
    assert load_settings({"XDG_CONFIG_HOME": str(tmp_path)}) == {
        "model": "org/name",
        "device": "cpu",
        "profile": "mine",
        "method": "snapkv",
        "attention": "eager",
        "dtype": "bfloat16",
        "chunk_size": 64,
        "score_block": 128,
        "budget": 256,
        "max_new_tokens": 8,
    }


@pytest.mark.parametrize("budget", ["full", "auto"])
def test_a_budget_in_words(tmp_path: Path, budget: str) -> None:
    write_config(tmp_path, f"budget: {budget}")
    assert load_settings({"XDG_CONFIG_HOME": str(tmp_path)}) == {"budget": budget}


def test_variables_over_the_file(tmp_path: Path) -> None:
    write_config(tmp_path, "model: from-file\ndevice: cpu\n")
    environ = {"XDG_CONFIG_HOME": str(tmp_path), "TIDEKV_MODEL": "from-variable", "TIDEKV_DEVICE": "cuda"}
    assert load_settings(environ) == {"model": "from-variable", "device": "cuda"}
    empty = {**environ, "TIDEKV_MODEL": "", "TIDEKV_DEVICE": ""}
    assert load_settings(empty) == {"model": "from-file", "device": "cpu"}


def test_variables_without_a_file(tmp_path: Path) -> None:
    environ = {"XDG_CONFIG_HOME": str(tmp_path), "TIDEKV_MODEL": "from-variable"}
    assert load_settings(environ) == {"model": "from-variable"}


@pytest.mark.parametrize("content", ["chunk-size: 5", "colour: red", "7: 8", "true: x", "null: x"])
def test_an_unknown_key(tmp_path: Path, content: str) -> None:
    assert "chunk_size" in assert_refused(tmp_path, content, "unknown key").hint


@pytest.mark.parametrize(
    "content",
    [
        "chunk_size: many",
        "chunk_size: 1.5",
        "chunk_size: true",
        "max_new_tokens: false",
        "budget: true",
        "budget: [1]",
        "budget: 1.5",
        "model: 5",
        "model: null",
        "device: [cpu]",
        "dtype: {a: b}",
    ],
)
def test_a_value_of_the_wrong_type(tmp_path: Path, content: str) -> None:
    assert_refused(tmp_path, content, content.split(":")[0])


@pytest.mark.parametrize("content", ["- model", "just text", "5", "[]", "0", "false"])
def test_no_mapping(tmp_path: Path, content: str) -> None:
    assert_refused(tmp_path, content, ":1: ", "must be a mapping")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        *((content, "no valid YAML") for content in (b"a: [1", b"a: b: c", b"\xff\xfe\xff", b"\x00")),
        (b"? [a]\n: 1", "must be a word"),
        (b"!!python/name:os.x", "must be a mapping"),
    ],
)
def test_no_yaml(tmp_path: Path, content: bytes, words: str) -> None:
    assert_refused(tmp_path, content, ":1: ", words)
