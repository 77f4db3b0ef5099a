"""Profiles, settings, units, methods: what is accepted, and that the rest is refused by name."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tidekv_cli.device import detect_device
from tidekv_cli.errors import DeviceError, UsageError
from tidekv_cli.methods import METHODS, SELECTORS, choose
from tidekv_cli.profile import find_profile, list_profiles, load_profile
from tidekv_cli.request import RunRequest, choose_settings
from tidekv_cli.settings import load_settings
from tidekv_cli.units import format_bytes, parse_bytes


def shipped(name: str = "cpu") -> dict[str, Any]:
    return yaml.safe_load(find_profile(name, {}).path.read_text(encoding="utf-8"))


def test_shipped_profiles() -> None:
    assert {"cpu", "generic-cuda"} <= set(list_profiles({}))
    for profile in list_profiles({}).values():
        assert profile.path.stem == profile.name
        stated = set(profile.sources)
        assert {"chunk_size", "budget", "dtype", *(f"reserve.{key}" for key in profile.reserve)} <= stated


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"chunk_size": 0}, "chunk_size"),
        ({"chunk_size": "many"}, "chunk_size"),
        ({"budget": True}, "budget"),
        ({"dtype": "int4"}, "int4"),
        ({"attention": ["magic"]}, "magic"),
        ({"kind": "abacus"}, "abacus"),
        ({"reserve": {"process": "lots"}}, "process"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_bad_profiles(tmp_path: Path, change: dict[str, Any], word: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump(shipped() | change), encoding="utf-8")
    with pytest.raises(UsageError, match=word) as caught:
        load_profile(path)
    assert "bad.yaml" in caught.value.message


@pytest.mark.parametrize("text", ["a: b: c", "- 1", "", "name: x"])
def test_files_that_are_no_profile(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=r"bad\.yaml"):
        load_profile(path)


def test_own_profiles_hide_shipped_ones(tmp_path: Path) -> None:
    (tmp_path / "cpu.yaml").write_text(yaml.safe_dump(shipped() | {"chunk_size": 77}), encoding="utf-8")
    environ = {"TIDEKV_PROFILE_DIR": str(tmp_path)}
    assert find_profile("cpu", environ).chunk_size == 77
    assert "generic-cuda" in list_profiles(environ)
    assert find_profile(str(tmp_path / "cpu.yaml"), {}).chunk_size == 77
    with pytest.raises(UsageError, match="does not exist"):
        list_profiles({"TIDEKV_PROFILE_DIR": str(tmp_path / "no")})


@pytest.mark.parametrize(
    ("text", "count"),
    [("6GiB", 6 << 30), ("6G", 6 << 30), ("500MB", 500_000_000), ("1.5k", 1536), ("12", 12), (" 2 MiB ", 2 << 20)],
)
def test_bytes(text: str, count: int) -> None:
    assert parse_bytes(text, "x") == count
    for bad in ("", "GiB", "-1G", "1X", "1e9", "nan"):
        with pytest.raises(UsageError, match="--memory"):
            parse_bytes(bad, "--memory")
    assert (format_bytes(None), format_bytes(1 << 20), format_bytes(3 << 29)) == ("unknown", "1.0 MiB", "1.500 GiB")


def test_selector_metadata_equals_the_classes() -> None:
    for info in SELECTORS.values():
        module, _, name = info.target.partition(":")
        fields = dataclasses.fields(getattr(importlib.import_module(module), name))
        assert [p.name for p in info.parameters] == [f.name for f in fields]
        built = info.build({})
        assert all(getattr(built, p.name) == p.default for p in info.parameters)
    snapkv = SELECTORS["snapkv"]
    assert all(
        f.default == p.default for f, p in zip(dataclasses.fields(snapkv.build({})), snapkv.parameters, strict=True)
    )


def test_axes_over_a_method() -> None:
    assert choose("tidekv-snapkv", "oneshot", None, None, None) is METHODS["snapkv"]
    assert choose("full", None, None, None, None) is METHODS["full"]
    unnamed = choose("snapkv", None, "recent", None, None)
    assert (unnamed.schedule, unnamed.selector) == ("oneshot", "recent") and unnamed.name not in METHODS


def test_flag_over_config_over_profile() -> None:
    profile = find_profile("cpu", {})
    assert choose_settings(RunRequest(), {}, profile).chunk_size == profile.chunk_size
    assert choose_settings(RunRequest(), {"chunk_size": 99}, profile).chunk_size == 99
    assert choose_settings(RunRequest(chunk_size=50), {"chunk_size": 99}, profile).chunk_size == 50
    assert choose_settings(RunRequest(budget="auto"), {"budget": 99}, profile).budget == "auto"
    assert choose_settings(RunRequest(selector="all"), {}, profile).budget is None


def test_environment_over_config(tmp_path: Path) -> None:
    (tmp_path / "tidekv").mkdir()
    (tmp_path / "tidekv/config.yaml").write_text("model: from-file\nbudget: full\n", encoding="utf-8")
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert load_settings(environ) == {"model": "from-file", "budget": "full"}
    assert load_settings(environ | {"TIDEKV_MODEL": "from-env"})["model"] == "from-env"
    assert load_settings({"XDG_CONFIG_HOME": str(tmp_path / "no")}) == {}


@pytest.mark.parametrize("version", [1, 2])
def test_the_least_limit_of_nested_control_groups_counts(tmp_path: Path, version: int) -> None:
    base = tmp_path / ("sys/fs/cgroup" if version == 2 else "sys/fs/cgroup/memory")
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    inner = base / "outer/inner"
    inner.mkdir(parents=True)
    for place, limit, used in (
        (inner, "max" if version == 2 else 1 << 62, 10),
        (inner.parent, 1000, 400),
        (base, 5000, 0),
    ):
        (place / names[0]).write_text(f"{limit}\n", encoding="ascii")
        (place / names[1]).write_text(f"{used}\n", encoding="ascii")
    (tmp_path / "proc/self").mkdir(parents=True)
    line = "0::/outer/inner\n" if version == 2 else "3:cpu,memory:/outer/inner\n"
    (tmp_path / "proc/self/cgroup").write_text(line, encoding="ascii")
    device = detect_device("auto", tmp_path)
    assert (device.total_bytes, device.free_bytes) == (1000, 600)
    assert "cgroup" in device.sources["total"] and "cgroup" in device.sources["free"]


def test_devices_that_cannot_be_used(tmp_path: Path) -> None:
    bare = detect_device("cpu", tmp_path)
    assert bare.kind == "cpu" and bare.name == "CPU" and bare.free_bytes
    with pytest.raises(DeviceError):
        detect_device("cuda:1")
    for nonsense in ("tpu", "cuda:x", ""):
        with pytest.raises(UsageError):
            detect_device(nonsense)
