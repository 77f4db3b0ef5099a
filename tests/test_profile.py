"""Device profiles: the shipped ones load, and a wrong one says which key, which value and what is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tidekv_cli.errors import UsageError
from tidekv_cli.profile import ATTENTION, DTYPES, KINDS, Profile, find_profile, list_profiles, load_profile
from tidekv_cli.profile import profile_directories as directories

VALUES: dict[str, Any] = {
    "name": "mine",
    "description": "for a test",
    "kind": "cpu",
    "chunk_size": 64,
    "score_block": 128,
    "budget": 256,
    "attention": ["eager"],
    "dtype": "bfloat16",
    "max_new_tokens": 8,
    "reserve": {"process": "1GiB", "other": 1000},
    "sources": {"budget": "made up"},
}
NUMBERS = ("chunk_size", "score_block", "budget", "max_new_tokens")


def write_profile(path: Path, **changes: Any) -> Path:
    """A profile file of `VALUES` with `changes`; None removes a key."""
    values = {key: value for key, value in {**VALUES, **changes}.items() if value is not None}
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def assert_refused(path: Path, *words: str) -> UsageError:
    with pytest.raises(UsageError) as caught:
        load_profile(path)
    for word in (str(path), *words):
        assert word in caught.value.message
    assert caught.value.hint
    return caught.value


def test_the_shipped_profiles() -> None:
    profiles = list_profiles({})
    assert set(profiles) == {"cpu", "generic-cuda"}
    for name, profile in profiles.items():
        assert profile.name == profile.path.stem == name
        assert profile.kind in KINDS and profile.dtype in DTYPES and set(profile.attention) <= set(ATTENTION)
        assert profile.reserve and all(amount > 0 for amount in profile.reserve.values())
        known = {*VALUES, *(f"reserve.{key}" for key in profile.reserve)}
        assert set(profile.sources) <= known, "a source for a key that is not there"
        for key in ("chunk_size", "budget", "dtype", *(f"reserve.{key}" for key in profile.reserve)):
            assert profile.sources[key]
    assert profiles["cpu"].kind == "cpu" and "flash-attn" not in profiles["cpu"].attention
    assert profiles["generic-cuda"].kind == "cuda"


def test_values_of_a_file(tmp_path: Path) -> None:
    path = write_profile(tmp_path / "mine.yaml")
    assert load_profile(path) == Profile(
        name="mine",
        description="for a test",
        kind="cpu",
        chunk_size=64,
        score_block=128,
        budget=256,
        attention=("eager",),
        dtype="bfloat16",
        max_new_tokens=8,
        reserve={"process": 1 << 30, "other": 1000},
        sources={"budget": "made up"},
        path=path,
    )


@pytest.mark.parametrize("key", VALUES)
def test_a_missing_key(tmp_path: Path, key: str) -> None:
    error = assert_refused(write_profile(tmp_path / "bad.yaml", **{key: None}), f"lacks the key '{key}'")
    assert key in error.hint


@pytest.mark.parametrize("key", ["chunk-size", "Budget", "extra"])
def test_an_unknown_key(tmp_path: Path, key: str) -> None:
    error = assert_refused(write_profile(tmp_path / "bad.yaml", **{key: 1}), f"unknown key '{key}'")
    assert "chunk_size" in error.hint


def test_a_key_that_is_no_text(tmp_path: Path) -> None:
    path = write_profile(tmp_path / "bad.yaml")
    path.write_text(path.read_text(encoding="utf-8") + "7: seven\n", encoding="utf-8")
    assert_refused(path, "unknown key '7'")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, value) for key in NUMBERS for value in ("many", 1.5, [1], True, False)),
        *((key, 7) for key in ("name", "description", "kind", "dtype")),
        ("dtype", True),
        ("attention", "sdpa"),
        ("attention", {"sdpa": 1}),
        ("reserve", "1GiB"),
        ("reserve", ["1GiB"]),
        ("sources", "the paper"),
    ],
)
def test_a_value_of_the_wrong_type(tmp_path: Path, key: str, value: object) -> None:
    error = assert_refused(write_profile(tmp_path / "bad.yaml", **{key: value}), f"{key}: {value!r}")
    assert "type" in error.hint


@pytest.mark.parametrize("key", NUMBERS)
@pytest.mark.parametrize("value", [0, -1])
def test_a_number_below_one(tmp_path: Path, key: str, value: int) -> None:
    error = assert_refused(write_profile(tmp_path / "bad.yaml", **{key: value}), f"{key}: {value}")
    assert "at least 1" in error.hint


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("kind", "gpu", KINDS),
        ("dtype", "int8", DTYPES),
        ("attention", ["sdpa", "magic"], ATTENTION),
        ("attention", [1], ATTENTION),
        ("attention", [None], ATTENTION),
    ],
)
def test_a_bad_choice(tmp_path: Path, key: str, value: Any, allowed: tuple[str, ...]) -> None:
    error = assert_refused(write_profile(tmp_path / "bad.yaml", **{"kind": "cuda", key: value}), key)
    assert all(name in error.hint for name in allowed)


@pytest.mark.parametrize("attention", [[], ["flash-attn"], ["sdpa", "flash-attn"]])
def test_attention_that_a_cpu_has_not(tmp_path: Path, attention: list[str]) -> None:
    error = assert_refused(write_profile(tmp_path / "bad.yaml", attention=attention), "attention")
    assert "flash-attn" not in error.hint


@pytest.mark.parametrize("amount", ["much", -1, True, [1], None, "1 parsec"])
def test_a_bad_reserve(tmp_path: Path, amount: object) -> None:
    assert_refused(write_profile(tmp_path / "bad.yaml", reserve={"process": amount}), "reserve.process")


@pytest.mark.parametrize(
    "content", [b"a: [1", b"a: b: c", b"\t- x", b"a: \xff\xfe", b"\x00", b"!!python/object:os.x {}"]
)
def test_no_yaml(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    assert_refused(path, "no valid YAML")


@pytest.mark.parametrize("content", ["just text", "- a\n- b\n", "5", "[]", "false"])
def test_no_mapping(tmp_path: Path, content: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(content, encoding="utf-8")
    assert_refused(path, "no mapping")


@pytest.mark.parametrize("content", ["", "null", "{}"])
def test_nothing_in_it(tmp_path: Path, content: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(content, encoding="utf-8")
    assert_refused(path, "lacks the key")


def test_a_missing_file_and_a_directory(tmp_path: Path) -> None:
    (tmp_path / "directory.yaml").mkdir()
    assert_refused(tmp_path / "missing.yaml", "No such file")
    assert_refused(tmp_path / "directory.yaml", "directory")


def test_the_users_own_directory_comes_first(tmp_path: Path) -> None:
    environ = {"TIDEKV_PROFILE_DIR": str(tmp_path)}
    write_profile(tmp_path / "any.yaml", name="cpu")
    write_profile(tmp_path / "other.yaml", name="mine")
    assert directories(environ)[0] == tmp_path and directories({}) == directories(environ)[1:]
    assert set(list_profiles(environ)) == {"cpu", "generic-cuda", "mine"}
    assert find_profile("cpu", environ).path == tmp_path / "any.yaml"
    assert find_profile("generic-cuda", environ) == find_profile("generic-cuda", {})
    assert find_profile("cpu", {}).description != "for a test"


def test_a_users_directory_that_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist") as caught:
        list_profiles({"TIDEKV_PROFILE_DIR": str(tmp_path / "missing")})
    assert str(tmp_path / "missing") in caught.value.message
    write_profile(tmp_path / "bad.yaml", budget=0)
    with pytest.raises(UsageError, match=r"bad\.yaml"):
        list_profiles({"TIDEKV_PROFILE_DIR": str(tmp_path)})


@pytest.mark.parametrize("name", ["mine.yaml", "mine.yml"])
def test_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    path = write_profile(tmp_path / name)
    assert find_profile(str(path), {}).path == path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_profile(f"~/{name}", {}).path == path
    monkeypatch.chdir(tmp_path)
    assert find_profile(name, {}).name == "mine"


@pytest.mark.parametrize("name", ["nonsense", "", "CPU", "cpu "])
def test_an_unknown_name(name: str) -> None:
    with pytest.raises(UsageError, match="no profile") as caught:
        find_profile(name, {})
    assert repr(name) in caught.value.message and "cpu, generic-cuda" in caught.value.hint
