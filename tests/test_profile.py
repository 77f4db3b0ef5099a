"""Device profiles: the shipped ones load and match their boards; a wrong one is refused by line and value."""

from __future__ import annotations

import json
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli_runner import run_cli
from tidekv_cli.errors import UsageError
from tidekv_cli.profile import (
    ATTENTION,
    DTYPES,
    KINDS,
    RESERVE_ITEMS,
    Match,
    Profile,
    find_profile,
    list_profiles,
    load_profile,
    match_profile,
)
from tidekv_cli.profile import profile_directories as directories

SHIPPED = {
    "a100-40gb",
    "a100-80gb",
    "cpu",
    "generic-cuda",
    "h100",
    "h200",
    "jetson-agx-orin-32gb",
    "jetson-agx-orin-64gb",
    "jetson-agx-thor",
    "jetson-orin-nano-8gb",
    "jetson-orin-nx-16gb",
    "jetson-orin-nx-8gb",
    "l4",
    "rtx-3090",
    "rtx-4060-laptop",
    "rtx-4090",
}
# The lines are counted on: `name` is in line 1.
TEXT = """\
name: mine
description: for a test
kind: cuda
match:
  names: ['*Toaster*']
  boards: ['*Kitchen*', 'Bath']
  total_mib: [1000, 2000]
memory: 1500MiB
bandwidth_gb_s: 68.5
tflops: 17
chunk_size: 64
score_block: 128
budget: 256
attention: [sdpa, eager]
dtype: bfloat16
max_new_tokens: 8
allocator:
  PYTORCH_CUDA_ALLOC_CONF: expandable_segments:True
reserve:
  context: 1GiB
  backend: 1000
sources:
  match.names: made up
  match.boards: made up
  match.total_mib: made up
  memory: made up
  bandwidth_gb_s: made up
  tflops: made up
  chunk_size: made up
  score_block: made up
  budget: made up
  attention: made up
  dtype: made up
  max_new_tokens: made up
  allocator: made up
  reserve.context: made up
  reserve.backend: made up
"""
LINES = {line.split(":")[0].strip(): number for number, line in enumerate(TEXT.splitlines()[:22], 1)}


def write_text(path: Path, text: str = TEXT) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def replaced(key: str, value: str) -> str:
    """`TEXT` with another value of the top-level key, which stays in its line."""
    lines = TEXT.splitlines(keepends=True)
    start = LINES[key] - 1
    stop = start + 1
    while stop < len(lines) and lines[stop].startswith(" "):
        stop += 1
    return "".join([*lines[:start], f"{key}: {value}\n", *lines[stop:]])


def changed(before: str, after: str) -> str:
    assert TEXT.count(before) == 1
    return TEXT.replace(before, after)


def assert_refused(path: Path, *words: str) -> UsageError:
    with pytest.raises(UsageError) as caught:
        load_profile(path)
    for word in (str(path), *words):
        assert word in caught.value.message
    assert caught.value.hint
    return caught.value


# What is shipped


def test_the_shipped_profiles() -> None:
    profiles = list_profiles({})
    assert set(profiles) == SHIPPED
    for name, profile in profiles.items():
        assert profile.name == profile.path.stem == name
        assert profile.kind in KINDS and profile.dtype in DTYPES and set(profile.attention) <= set(ATTENTION)
        assert profile.reserve and set(profile.reserve) <= set(RESERVE_ITEMS)
        assert all(amount > 0 for amount in profile.reserve.values())
        if name in ("cpu", "generic-cuda"):
            assert profile.match == Match() and profile.memory is None
        else:
            assert profile.memory and profile.bandwidth_gb_s and profile.tflops and profile.match != Match()
            assert sum(profile.reserve.values()) < profile.memory / 2
            assert (profile.chunk_size, profile.score_block, profile.budget) == (2048, 2048, 4096)
    assert profiles["cpu"].kind == "cpu" and "flash-attn" not in profiles["cpu"].attention
    assert profiles["generic-cuda"].kind == "cuda"


def test_every_value_has_a_source() -> None:
    facts = {"memory", "bandwidth_gb_s", "tflops", "chunk_size", "score_block", "budget", "attention", "dtype"}
    for profile in list_profiles({}).values():
        written = yaml.safe_load(profile.path.read_text(encoding="utf-8"))
        wanted = facts | {"max_new_tokens", "allocator", *(f"reserve.{item}" for item in profile.reserve)}
        assert set(profile.sources) == wanted | {f"match.{key}" for key in written["match"]}, profile.name
        assert all(len(source) > 3 for source in profile.sources.values())


def test_allocators_get_only_what_they_know() -> None:
    for profile in list_profiles({}).values():
        discrete = profile.kind == "cuda" and profile.name != "generic-cuda"
        expected = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if discrete else {}
        assert profile.allocator == expected, profile.name


ORIN = ("Orin", "Orin (nvgpu)")
AGX = ("NVIDIA Jetson AGX Orin Developer Kit", "Jetson AGX Orin")
NX = ("NVIDIA Jetson Orin NX Engineering Reference Developer Kit",)
NANO = (
    "NVIDIA Orin Nano Developer Kit",
    "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super",
)
BOARDS = [
    # names the driver gives, boards of the device tree, totals in MiB, the profile
    (("NVIDIA A100-PCIE-40GB", "NVIDIA A100-SXM4-40GB"), (None,), (40960, 40330), "a100-40gb"),
    (("NVIDIA A100 80GB PCIe", "NVIDIA A100-SXM4-80GB", "A100-SXM-80GB"), (None,), (81920, 81252), "a100-80gb"),
    (("NVIDIA GeForce RTX 4090", "GeForce RTX 4090"), (None,), (24564, 24166), "rtx-4090"),
    (("NVIDIA GeForce RTX 3090",), (None,), (24576,), "rtx-3090"),
    (("NVIDIA L4",), (None,), (23034,), "l4"),
    (("NVIDIA H100 80GB HBM3",), (None,), (81559,), "h100"),
    (("NVIDIA H200",), (None,), (143771,), "h200"),
    (("NVIDIA GeForce RTX 4060 Laptop GPU",), (None,), (8188,), "rtx-4060-laptop"),
    (ORIN, AGX, (62841, 62817), "jetson-agx-orin-64gb"),
    (ORIN, AGX, (30536,), "jetson-agx-orin-32gb"),
    (ORIN, NX, (15656,), "jetson-orin-nx-16gb"),
    (ORIN, NX, (7577,), "jetson-orin-nx-8gb"),
    (ORIN, NANO, (7620,), "jetson-orin-nano-8gb"),
    (("NVIDIA Thor",), ("NVIDIA Jetson AGX Thor Developer Kit", None), (125772,), "jetson-agx-thor"),
]
SEEN = [
    (n, b, total, profile) for names, boards, mib, profile in BOARDS for n in names for b in boards for total in mib
]


@pytest.mark.parametrize(("name", "board", "total_mib", "expected"), SEEN)
def test_a_board_finds_its_profile(name: str, board: str | None, total_mib: int, expected: str) -> None:
    kind = "jetson" if expected.startswith("jetson") else "cuda"
    profiles = list_profiles({})
    assert match_profile(name, kind, board, total_mib << 20, profiles).name == expected
    matching = [p.name for p in profiles.values() if p.match.accepts(name, board, total_mib << 20)]
    assert matching == [expected]  # whatever the order


@pytest.mark.parametrize(
    ("name", "kind", "board", "total_mib", "expected"),
    [
        ("NVIDIA GeForce RTX 4080", "cuda", None, 16376, "generic-cuda"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "cuda", None, 16376, "generic-cuda"),
        ("NVIDIA GeForce RTX 3090 Ti", "cuda", None, 24564, "generic-cuda"),
        ("NVIDIA L40S", "cuda", None, 46068, "generic-cuda"),
        ("NVIDIA H100 PCIe", "cuda", None, 81559, "generic-cuda"),
        ("NVIDIA GH200 480GB", "cuda", None, 97871, "generic-cuda"),
        ("NVIDIA A100-SXM4-40GB", "cuda", None, 4864, "generic-cuda"),
        ("NVIDIA A100-SXM4-40GB", "cuda", None, None, "generic-cuda"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "cuda", None, 4864, "generic-cuda"),
        ("Orin", "jetson", None, 62841, "generic-cuda"),
        ("Orin", "jetson", AGX[0], None, "generic-cuda"),
        ("Orin", "jetson", "NVIDIA Jetson Orin Nano Developer Kit 4GB", 3600, "generic-cuda"),
        ("Orin", "jetson", "a board of another maker", 62841, "generic-cuda"),
        ("NVIDIA L4", "cpu", None, 23034, "cpu"),
        ("AMD EPYC", "cpu", None, None, "cpu"),
        ("", "cuda", "", 0, "generic-cuda"),
        ("NVIDIA [L4]", "cuda", None, 23034, "generic-cuda"),
    ],
)
def test_another_device_falls_back(
    name: str, kind: str, board: str | None, total_mib: int | None, expected: str
) -> None:
    total = None if total_mib is None else total_mib << 20
    assert match_profile(name, kind, board, total, list_profiles({})).name == expected


def test_the_names_of_a_device_are_matched_in_any_case() -> None:
    assert match_profile("nvidia l4", "cuda", None, None, list_profiles({})).name == "l4"


def test_the_users_own_profile_is_matched_first(tmp_path: Path) -> None:
    text = changed("names: ['*Toaster*']", "names: ['NVIDIA L4', 'x']")
    text = text.replace("  boards: ['*Kitchen*', 'Bath']\n", "").replace("  match.boards: made up\n", "")
    write_text(tmp_path / "zz.yaml", text)
    profiles = list_profiles({"TIDEKV_PROFILE_DIR": str(tmp_path)})
    assert match_profile("NVIDIA L4", "cuda", None, 1500 << 20, profiles).name == "mine"
    assert match_profile("NVIDIA L4", "cuda", None, 2000 << 20, profiles).name == "mine"
    assert match_profile("NVIDIA L4", "cuda", None, (2000 << 20) + 1, profiles).name == "l4"
    assert match_profile("NVIDIA L4", "cuda", None, (1000 << 20) - 1, profiles).name == "l4"


# A file's values


def test_values_of_a_file(tmp_path: Path) -> None:
    path = write_text(tmp_path / "mine.yaml")
    assert load_profile(path) == Profile(
        name="mine",
        description="for a test",
        kind="cuda",
        match=Match(("*Toaster*",), ("*Kitchen*", "Bath"), (1000, 2000)),
        memory=1500 << 20,
        bandwidth_gb_s=68.5,
        tflops=17.0,
        chunk_size=64,
        score_block=128,
        budget=256,
        attention=("sdpa", "eager"),
        dtype="bfloat16",
        max_new_tokens=8,
        allocator={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        reserve={"context": 1 << 30, "backend": 1000},
        sources={line.split(":")[0].strip(): "made up" for line in TEXT.splitlines()[22:]},
        path=path,
    )


@pytest.mark.parametrize("key", ["memory", "bandwidth_gb_s", "tflops"])
@pytest.mark.parametrize("null", ["null", "~", ""])
def test_what_may_be_unknown(tmp_path: Path, key: str, null: str) -> None:
    assert getattr(load_profile(write_text(tmp_path / "mine.yaml", replaced(key, null))), key) is None


# What is refused, and in which line

NUMBERS = ("chunk_size", "score_block", "budget", "max_new_tokens")
TOKENS = "a number of tokens, at least 1"
WRONG: list[tuple[str, str, str]] = [
    *((key, value, TOKENS) for key in NUMBERS for value in ("abc", "0", "-1", "1.5", "true", "null", "[1]")),
    *(("budget", value, TOKENS) for value in ("{a: 1}", '"64"', ".nan", ".inf", "010", "0x10", "1_000", "1:30")),
    *(("budget", value, TOKENS) for value in ("2026-11-30", "", "1e3", "!!int abc", "!!python/name:os.system 1")),
    *(("budget", value, "at most 1048576") for value in ("1048577", "9" * 5000)),
    *(("tflops", value, "a number above 0") for value in ("fast", "0", "-1", ".nan", ".inf", "-.inf", "true", "[1]")),
    *(("bandwidth_gb_s", value, "a number above 0") for value in ("{}", '"68"', "1:30.5", "2026-11-30", "9" * 5000)),
    *(("memory", value, "an amount of memory") for value in ("much", "-1", "0", "1.5", "true", "[1]", "1 parsec")),
    *(("memory", value, "an amount of memory") for value in ("9" * 18 + "TiB", ".nan", "2026-11-30")),
    *((key, value, "a line of text") for key in ("name", "description") for value in ("7", "null", "[a]", '"  "')),
    *(("name", value, "a line of text") for value in ('"a\\nb"', '"a\\0b"', "2026-11-30", "yes")),
    *(("kind", value, ", ".join(KINDS)) for value in ("gpu", "7", "null", "[cuda]")),
    *(("dtype", value, ", ".join(DTYPES)) for value in ("int8", "16", "{}")),
    *(("attention", value, "a list of backends") for value in ("sdpa", "[]", "{sdpa: 1}", "null")),
    *(("match", value, "a mapping") for value in ("[]", "null", "here", "!!set {names}")),
    *(("reserve", value, "a mapping") for value in ("1GiB", "[1GiB]", "null")),
    *(("allocator", value, "a mapping") for value in ("null", "[A=1]", "x")),
    *(("sources", value, "a mapping") for value in ("the paper", "[a]", "null")),
]


@pytest.mark.parametrize(("key", "value", "allowed"), WRONG, ids=[f"{k}={v[:20]}" for k, v, _ in WRONG])
def test_a_wrong_value(tmp_path: Path, key: str, value: str, allowed: str) -> None:
    path = write_text(tmp_path / "bad.yaml", replaced(key, value))
    error = assert_refused(path, f"{path}:{LINES[key]}: {key} is ", "; it must be ", allowed)
    assert len(error.message) < 300 + len(str(path))


def test_the_whole_message(tmp_path: Path) -> None:
    path = write_text(tmp_path / "x.yaml", replaced("chunk_size", "abc"))
    assert assert_refused(path).message == (
        f"{path}:11: chunk_size is 'abc'; it must be a number of tokens, at least 1"
    )


@pytest.mark.parametrize(
    ("before", "after", "line", "words"),
    [
        ("names: ['*Toaster*']", "names: []", 5, "match.names is an empty list; it must be a list of patterns"),
        ("names: ['*Toaster*']", "names: '*Toaster*'", 5, "match.names is '*Toaster*'; it must be a list"),
        ("names: ['*Toaster*']", "names: [7]", 5, "match.names[0] is 7; it must be a line of text"),
        ("names: ['*Toaster*']", "names: [[a]]", 5, "match.names[0] is a list of 1; it must be a line of text"),
        ("names: ['*Toaster*']", "name: [a]", 5, "unknown key 'name' in match; did you mean 'names'?"),
        ("'Bath']", "\n    null]", 7, "match.boards[1] is nothing; it must be a line of text"),
        ("[1000, 2000]", "[1000]", 7, "match.total_mib is a list of 1; it must be a list of two numbers"),
        ("[1000, 2000]", "[1000, 2000, 3]", 7, "match.total_mib is a list of 3"),
        ("[1000, 2000]", "[2000, 1000]", 7, "2000 is above 1000"),
        ("[1000, 2000]", "[1000, big]", 7, "match.total_mib[1] is 'big'; it must be a number of MiB"),
        ("[1000, 2000]", "1000", 7, "match.total_mib is 1000; it must be a list"),
        ("attention: [sdpa, eager]", "attention: [sdpa, magic]", 14, "attention[1] is 'magic'; it must be one of"),
        ("attention: [sdpa, eager]", "attention:\n- sdpa\n- 1", 16, "attention[1] is 1; it must be one of"),
        ("expandable_segments:True", "true", 18, "allocator.PYTORCH_CUDA_ALLOC_CONF is true; it must be a line"),
        ("PYTORCH_CUDA_ALLOC_CONF:", "LD_PRELOAD:", 18, "allocator.LD_PRELOAD must be a variable that begins with"),
        ("context: 1GiB", "contxt: 1GiB", 20, "unknown key 'contxt' in reserve; did you mean 'context'?"),
        ("context: 1GiB", "context: much", 20, "reserve.context is 'much'; it must be an amount of memory"),
        ("context: 1GiB", "context: -1", 20, "reserve.context is -1; it must be an amount of memory"),
        ("context: 1GiB", "context: {a: {b: 1}}", 20, "reserve.context is a mapping of 1; it must be an amount"),
        ("  memory: made up", "  memory: 7", 26, "sources.memory is 7; it must be a line of text"),
        ("  memory: made up", "  memroy: made up", 26, "unknown key 'memroy' in sources; did you mean 'memory'?"),
        ("  memory: made up\n", "", 22, "the key 'memory' in sources is missing"),
        ("  reserve.backend: made up\n", "", 22, "the key 'reserve.backend' in sources is missing"),
        ("  match.boards: made up\n", "", 22, "the key 'match.boards' in sources is missing"),
        ("  context: 1GiB\n", "", 35, "unknown key 'reserve.context' in sources"),
        ("chunk_size: 64", "chunk-size: 64", 11, "unknown key 'chunk-size'; did you mean 'chunk_size'?"),
        ("dtype: bfloat16", "Dtype: bfloat16", 15, "unknown key 'Dtype'; did you mean 'dtype'?"),
        ("budget: 256", "budget: 256\nzzz: 1", 14, "unknown key 'zzz'"),
        ("budget: 256", "budget: 256\n7: seven", 14, "unknown key '7'"),
        ("budget: 256", "budget: 256\n~: 1", 14, "unknown key '~'"),
        ("budget: 256", "budget: 256\n<<: {tflops: 1}", 14, "unknown key '<<'"),
        ("budget: 256", "budget: 256\n[a, b]: 1", 14, "a key is a list or a mapping"),
        ("budget: 256", "budget: 256\nchunk_size: 1", 14, "the key chunk_size is there twice, in lines 11 and 14"),
        ("backend: 1000", "context: 1000", 21, "the key reserve.context is there twice, in lines 20 and 21"),
        ("budget: 256", "budget: &a 256\ntflops: *a", 14, "the key tflops is there twice"),
        ("name: mine", "name: &a mine\nx: *a", 2, "x is an alias"),
        ("attention: [sdpa, eager]", "attention: &a [*a]", 14, "attention[0] is an alias"),
        ("budget: 256", "budget: *nowhere", 13, "no valid YAML: found undefined alias"),
        ("budget: 256", "budget: [256", 14, "no valid YAML"),
        ("budget: 256", "budget: a: b", 13, "no valid YAML: mapping values are not allowed here"),
        ("budget: 256", "budget: \x01", 1, "no valid YAML"),
        ("budget: 256", "budget: 256\n--- x", 14, "no valid YAML"),
        ("budget: 256", "\tbudget: 256", 13, "no valid YAML"),
        ("budget: 256", "budget: '256", 38, "no valid YAML"),
        ("budget: 256", "budget: " + "[" * 20000, 1, "nested too deeply"),
        ("budget: 256", "budget: 256\n" + "k" * 500 + ": 1", 14, "unknown key 'kkk"),
    ],
)
def test_the_line_of_an_error(tmp_path: Path, before: str, after: str, line: int, words: str) -> None:
    path = write_text(tmp_path / "bad.yaml", changed(before, after))
    error = assert_refused(path, f"{path}:{line}: ", words)
    assert len(error.message) < 300 + len(str(path))


@pytest.mark.parametrize("key", [key for key in LINES if TEXT.splitlines()[LINES[key] - 1].startswith(key)])
def test_a_missing_key(tmp_path: Path, key: str) -> None:
    path = tmp_path / "bad.yaml"
    without = replaced(key, "x").replace(f"{key}: x\n", "")
    error = assert_refused(write_text(path, without), f"{path}:1: the key '{key}' is missing")
    assert key in error.hint


@pytest.mark.parametrize("absent", ["flash-attn", "efficient"])
def test_attention_that_a_cpu_has_not(tmp_path: Path, absent: str) -> None:
    text = changed("kind: cuda", "kind: cpu").replace("[sdpa, eager]", f"[sdpa, {absent}]")
    path = write_text(tmp_path / "bad.yaml", text)
    assert_refused(path, f"{path}:14: attention names {absent}")


@pytest.mark.parametrize("content", ["just text", "- a\n- b\n", "5", "[]", "false", "!!python/object:os.x {}"])
def test_no_mapping(tmp_path: Path, content: str) -> None:
    path = write_text(tmp_path / "bad.yaml", content)
    assert_refused(path, f"{path}:1: the file is ", "it must be a mapping")


@pytest.mark.parametrize("content", ["", "{}", "# nothing\n", "---\n"])
def test_nothing_in_it(tmp_path: Path, content: str) -> None:
    path = write_text(tmp_path / "bad.yaml", content)
    assert_refused(path, f"{path}:1: ", "is missing")


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(b"name: mine\nkind: \xff\xfe\n")
    assert_refused(path, f"{path}:2: no valid YAML: it is not UTF-8")


def test_a_bomb_of_aliases_is_refused_at_once(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 60))]
    assert_refused(write_text(tmp_path / "bad.yaml", "\n".join(lines)), ":2: a1[0] is an alias")


def test_a_file_without_end() -> None:
    assert_refused(Path("/dev/zero"), "is no file")


def test_a_long_file_and_a_pipe(tmp_path: Path) -> None:
    long = tmp_path / "long.yaml"
    long.write_text("#" * 70_000, encoding="utf-8")
    assert_refused(long, "longer than 65536 bytes")
    os.mkfifo(tmp_path / "pipe.yaml")
    assert_refused(tmp_path / "pipe.yaml", "is no file")
    long.unlink()
    assert "cpu" in list_profiles({"TIDEKV_PROFILE_DIR": str(tmp_path)})  # the pipe is passed over


def test_a_missing_file_and_a_directory(tmp_path: Path) -> None:
    (tmp_path / "directory.yaml").mkdir()
    assert_refused(tmp_path / "missing.yaml", "No such file")
    assert_refused(tmp_path / "directory.yaml", "directory")
    assert_refused(Path("a\0b.yaml"), "cannot be read")


# Where they are found


def test_the_users_own_directory_comes_first(tmp_path: Path) -> None:
    environ = {"TIDEKV_PROFILE_DIR": str(tmp_path)}
    write_text(tmp_path / "any.yaml", changed("name: mine", "name: cpu"))
    write_text(tmp_path / "other.yaml")
    assert directories(environ)[0] == tmp_path and directories({}) == directories(environ)[1:]
    profiles = list_profiles(environ)
    assert set(profiles) == {*SHIPPED, "mine"} and list(profiles)[:2] == ["cpu", "mine"]
    assert find_profile("cpu", environ).path == tmp_path / "any.yaml"
    assert find_profile("generic-cuda", environ) == find_profile("generic-cuda", {})
    assert find_profile("cpu", {}).description != "for a test"


def test_a_users_directory_that_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist") as caught:
        list_profiles({"TIDEKV_PROFILE_DIR": str(tmp_path / "missing")})
    assert str(tmp_path / "missing") in caught.value.message
    write_text(tmp_path / "bad.yaml", replaced("budget", "0"))
    with pytest.raises(UsageError, match=r"bad\.yaml:13: budget is 0"):
        list_profiles({"TIDEKV_PROFILE_DIR": str(tmp_path)})


@pytest.mark.parametrize("name", ["mine.yaml", "mine.yml"])
def test_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    path = write_text(tmp_path / name)
    assert find_profile(str(path), {}).path == path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_profile(f"~/{name}", {}).path == path
    monkeypatch.chdir(tmp_path)
    assert find_profile(name, {}).name == "mine"


@pytest.mark.parametrize("name", ["nonsense", "", "CPU", "cpu ", "../profiles/cpu"])
def test_an_unknown_name(name: str) -> None:
    with pytest.raises(UsageError, match="no profile") as caught:
        find_profile(name, {})
    assert repr(name) in caught.value.message and "cpu, generic-cuda" in caught.value.hint


# At the command line


def test_the_list_of_profiles() -> None:
    lines = run_cli("profiles").out.splitlines()
    assert {line.split()[0] for line in lines[1:]} == SHIPPED
    (row,) = [line for line in lines if line.startswith("rtx-4090 ")]
    assert "23.988 GiB" in row and "NVIDIA GeForce RTX 4090" in row


def test_one_profile_with_its_sources(tmp_path: Path) -> None:
    shown = run_cli("profiles", "jetson-orin-nano-8gb").out.splitlines()
    profile = find_profile("jetson-orin-nano-8gb", {})
    rows = {line.split()[0]: line for line in shown if line}
    for key, source in profile.sources.items():
        assert rows[key].endswith(source), key
    assert "68 GB/s" in rows["bandwidth_gb_s"] and "10 TFLOP/s" in rows["tflops"]
    assert "*Orin Nano*" in rows["match.boards"] and "6000 to 8500" in rows["match.total_mib"]
    assert "nothing set" in rows["allocator"] and str(profile.path) in shown[-1]
    own = run_cli("profiles", str(write_text(tmp_path / "mine.yaml"))).out
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in own


def test_profiles_as_json() -> None:
    document = run_cli("profiles", "--json").document
    assert document["schema"] == 1 and {entry["name"] for entry in document["profiles"]} == SHIPPED
    (card,) = run_cli("profiles", "rtx-4090", "--json").document["profiles"]
    profile = find_profile("rtx-4090", {})
    assert card["memory"] == profile.memory == 24564 << 20 and card["reserve"] == dict(profile.reserve)
    assert card["sources"] == dict(profile.sources) and card["match"]["names"] == list(profile.match.names)
    assert set(card) == {*Profile.__dataclass_fields__}


def test_a_broken_profile_at_the_command_line(tmp_path: Path) -> None:
    path = write_text(tmp_path / "bad.yaml", replaced("budget", "0"))
    result = run_cli("profiles", environ={"TIDEKV_PROFILE_DIR": str(tmp_path)})
    result.assert_error(2, f"{path}:13: budget is 0")
    result = run_cli("profiles", str(path), "--json")
    result_document: dict[str, Any] = json.loads(result.out)
    assert result.code == 2 and f"{path}:13" in result_document["error"]["message"]


# Whatever a file holds

PIECES = [b"", b"[", b"{", b"*a", b"&a ", b"!!int ", b": ", b"\n", b"\t", b"\xff", b"\0", b"- "]


@pytest.mark.parametrize("seed", range(8))
def test_a_damaged_file_ends_in_a_profile_or_an_error_with_its_line(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    path = tmp_path / "bad.yaml"
    for _ in range(40):
        content = bytearray(TEXT.encode())
        for _ in range(chance.randrange(1, 4)):
            start = chance.randrange(len(content))
            piece = chance.choice(
                [b"", b"[", b"{", b"*a", b"&a ", b"!!int ", b": ", b"\n", b"\t", b"\xff", b"\0", b"- "]
            )
            content[start : start + chance.choice([0, 1, 8])] = piece
        path.write_bytes(content)
        try:
            assert load_profile(path).path == path
        except UsageError as error:
            assert re.match(re.escape(str(path)) + r":[1-9]\d*: ", error.message), error.message
            assert int(error.message[len(str(path)) + 1 :].split(":")[0]) <= content.count(b"\n") + 1
