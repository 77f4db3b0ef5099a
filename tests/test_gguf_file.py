"""GGUF headers: the same as gguf's own reader, and damage of any kind is a `ModelError` that names the file."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType

from tests.builders import packed_as, write_gguf
from tidekv_cli.errors import ModelError
from tidekv_cli.gguf_file import GgufFile, read_gguf

KIND = GGMLQuantizationType
METADATA: dict[str, Any] = {
    "a.uint8": (200, GGUFValueType.UINT8),
    "a.int8": (-100, GGUFValueType.INT8),
    "a.uint16": (60000, GGUFValueType.UINT16),
    "a.int16": (-30000, GGUFValueType.INT16),
    "a.uint32": (4_000_000_000, GGUFValueType.UINT32),
    "a.int32": (-2_000_000_000, GGUFValueType.INT32),
    "a.uint64": ((1 << 64) - 1, GGUFValueType.UINT64),
    "a.int64": (-(1 << 62), GGUFValueType.INT64),
    "a.float32": (0.1, GGUFValueType.FLOAT32),
    "a.float64": (0.1, GGUFValueType.FLOAT64),
    "a.true": True,
    "a.false": False,
    "a.text": "Größe 東京 \n",
    "a.numbers": [1, -2, 3],
    "a.floats": [0.5, -1.25],
    "a.flags": [True, False, True],
    "a.texts": ["", "ä", "the"],
}


def sample_tensors() -> dict[str, tuple[np.ndarray, GGMLQuantizationType]]:
    random_values = np.random.default_rng(0)
    shapes = {
        "vector.weight": ((7,), KIND.F32),
        "halves.weight": ((3, 5), KIND.F16),
        "brain.weight": ((2, 9), KIND.BF16),
        "eight.weight": ((4, 64), KIND.Q8_0),
        "four.weight": ((2, 3, 32), KIND.Q4_1),
        "six.weight": ((2, 256), KIND.Q6_K),
    }
    return {
        name: (packed_as(random_values.standard_normal(shape, np.float32), kind), kind)
        for name, (shape, kind) in shapes.items()
    }


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    """A file with every kind of metadata and several kinds of tensors."""
    return write_gguf(tmp_path / "sample.gguf", METADATA, sample_tensors())


def header(entries: bytes = b"", tensors: int = 0, keys: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + entries


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def assert_damaged(path: Path, *words: str) -> None:
    with pytest.raises(ModelError) as caught:
        read_gguf(path)
    assert str(path) in caught.value.message
    for word in words:
        assert word in caught.value.message
    assert caught.value.hint


def assert_parses_or_refuses(path: Path) -> bool:
    try:
        read_gguf(path)
    except ModelError as error:
        assert str(path) in error.message
        return False
    return True


@pytest.mark.parametrize("alignment", [None, 64, 256])
def test_the_same_as_ggufs_own_reader(tmp_path: Path, alignment: int | None) -> None:
    path = write_gguf(tmp_path / "sample.gguf", METADATA, sample_tensors(), alignment=alignment)
    file, reader = read_gguf(path), GGUFReader(path)
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert file.metadata == {name: field.contents() for name, field in fields.items()}
    assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        entry = file.tensors[tensor.name]
        assert entry.shape == tuple(reversed(tensor.shape.tolist()))
        assert (entry.type_id, entry.start, entry.nbytes) == (tensor.tensor_type, tensor.data_offset, tensor.n_bytes)
        assert path.read_bytes()[entry.start : entry.start + entry.nbytes] == tensor.data.tobytes()
        assert entry.start % (alignment or 32) == 0


def test_metadata_values_and_their_types(sample: Path) -> None:
    file = read_gguf(sample)
    given = {key: value[0] if isinstance(value, tuple) else value for key, value in METADATA.items()}
    given["a.float32"] = struct.unpack("<f", struct.pack("<f", 0.1))[0]
    read = {key: value for key, value in file.metadata.items() if key in given}
    assert read == given
    assert {key: type(value) for key, value in read.items()} == {key: type(value) for key, value in given.items()}
    assert file.architecture == "llama" and file.path == sample


def test_version_2_and_arrays_of_arrays(tmp_path: Path) -> None:
    inner = struct.pack("<IQ", 4, 2) + struct.pack("<II", 7, 8)
    nested = text(b"k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 2) + inner + struct.pack("<IQ", 8, 0)
    empty = text(b"") + struct.pack("<I", 8) + text(b"")
    path = tmp_path / "two.gguf"
    path.write_bytes(header(nested + empty, keys=2, version=2))
    file = read_gguf(path)
    assert file.metadata == {"k": [[7, 8], []], "": ""} and file.tensors == {} and file.architecture == ""


def test_no_metadata_and_no_tensors(tmp_path: Path) -> None:
    path = tmp_path / "bare.gguf"
    path.write_bytes(header())
    file = read_gguf(path)
    assert (file.metadata, file.tensors) == ({}, {})


def test_truncated_anywhere(sample: Path, tmp_path: Path) -> None:
    blob = sample.read_bytes()
    needed = max(entry.start + entry.nbytes for entry in read_gguf(sample).tensors.values())
    cut = tmp_path / "cut.gguf"
    for length in np.linspace(0, len(blob) - 1, 60).astype(int):
        cut.write_bytes(blob[:length])
        assert assert_parses_or_refuses(cut) == (length >= needed), length


def test_a_flipped_byte_in_the_header(sample: Path, tmp_path: Path) -> None:
    blob, seeded = sample.read_bytes(), random.Random(20)
    end = min(entry.start for entry in read_gguf(sample).tensors.values())
    flipped, refused = tmp_path / "flipped.gguf", 0
    for _ in range(200):
        damaged = bytearray(blob)
        damaged[seeded.randrange(end)] ^= 1 << seeded.randrange(8)
        flipped.write_bytes(damaged)
        refused += not assert_parses_or_refuses(flipped)
    assert refused > 50


def test_a_replaced_byte_in_the_header(sample: Path, tmp_path: Path) -> None:
    blob, seeded = sample.read_bytes(), random.Random(21)
    end = min(entry.start for entry in read_gguf(sample).tensors.values())
    replaced, refused = tmp_path / "replaced.gguf", 0
    for _ in range(200):
        damaged = bytearray(blob)
        damaged[seeded.randrange(end)] = seeded.randrange(256)
        replaced.write_bytes(damaged)
        refused += not assert_parses_or_refuses(replaced)
    assert refused > 50


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(header(keys=1 << 63), id="keys"),
        pytest.param(header(tensors=(1 << 64) - 1), id="tensors"),
        pytest.param(header(struct.pack("<Q", (1 << 64) - 1) + bytes(64), keys=1), id="length of a key"),
        pytest.param(header(text(b"k") + struct.pack("<IQ", 8, 1 << 63) + bytes(64), keys=1), id="length of a text"),
        pytest.param(header(text(b"k") + struct.pack("<IIQ", 9, 4, 1 << 62) + bytes(64), keys=1), id="array"),
        pytest.param(header(text(b"k") + struct.pack("<IIQ", 9, 0, 80) + bytes(64), keys=1), id="array past the end"),
        pytest.param(header(text(b"k") + struct.pack("<IIQ", 9, 99, 1) + bytes(64), keys=1), id="kind of an item"),
        pytest.param(header(text(b"k") + struct.pack("<I", 99) + bytes(64), keys=1), id="kind of a value"),
        pytest.param(header(text(b"t") + struct.pack("<I", 1 << 31) + bytes(64), tensors=1), id="dimensions"),
        pytest.param(header(text(b"t") + struct.pack("<II", 0, 0) + bytes(64), tensors=1), id="no dimension"),
    ],
)
def test_impossible_counts(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "counts.gguf"
    path.write_bytes(content)
    assert_damaged(path)


def test_tensors_that_end_after_the_file(tmp_path: Path) -> None:
    path = tmp_path / "long.gguf"
    shape = struct.pack("<IQQ", 2, 1 << 40, 1 << 40)
    path.write_bytes(header(text(b"huge") + shape + struct.pack("<IQ", KIND.F32, 0), tensors=1) + bytes(100))
    assert_damaged(path, "'huge'", "truncated")
    path.write_bytes(header(text(b"far") + struct.pack("<IQIQ", 1, 1, KIND.F32, (1 << 64) - 4), tensors=1) + bytes(100))
    assert_damaged(path, "'far'", "truncated")


def test_tensors_of_unknown_kind_or_with_broken_rows(tmp_path: Path) -> None:
    path = tmp_path / "kinds.gguf"
    path.write_bytes(header(text(b"odd") + struct.pack("<IQIQ", 1, 32, 4, 0), tensors=1) + bytes(100))  # 4 was Q4_2
    assert_damaged(path, "'odd'", "GGML type 4")
    path.write_bytes(header(text(b"row") + struct.pack("<IQIQ", 1, 33, KIND.Q8_0, 0), tensors=1) + bytes(100))
    assert_damaged(path, "'row'", "32")


@pytest.mark.parametrize("value", [0, -32])
def test_impossible_alignment(tmp_path: Path, value: int) -> None:
    path = tmp_path / "alignment.gguf"
    path.write_bytes(header(text(b"general.alignment") + struct.pack("<Ii", 5, value), keys=1))
    assert_damaged(path, "alignment", str(value))


def test_alignment_that_is_no_number(tmp_path: Path) -> None:
    path = tmp_path / "alignment.gguf"
    path.write_bytes(header(text(b"general.alignment") + struct.pack("<IIQI", 9, 4, 1, 32), keys=1))
    assert_damaged(path, "alignment", "[32]")


def test_arrays_nested_without_end(tmp_path: Path) -> None:
    path = tmp_path / "nested.gguf"
    path.write_bytes(header(text(b"k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 3000, keys=1))
    assert_damaged(path, "malformed")


def test_values_of_a_type(sample: Path) -> None:
    file = GgufFile(sample, {"i": 3, "f": 0.5, "b": True, "s": "x", "l": [1, 2]}, {})
    assert file.value("i", int) == 3 and file.value("f", float) == 0.5 and file.value("b", bool) is True
    assert file.value("i", float) == 3.0 and file.values("l", int) == [1, 2]
    assert (
        file.value("none", int, 7) == 7 and file.value("none", int, None) is None and file.values("none", int, []) == []
    )
    for key, kind in (("b", int), ("b", float), ("f", int), ("s", list), ("l", str), ("i", bool), ("none", int)):
        with pytest.raises(ModelError, match=str(sample)):
            file.value(key, kind)
    with pytest.raises(ModelError, match="no str"):
        file.values("l", str)


@pytest.mark.parametrize("version", [0, 1, 4, 3 << 24])
def test_other_versions(tmp_path: Path, version: int) -> None:
    path = tmp_path / "version.gguf"
    path.write_bytes(header(bytes(64), version=version))
    assert_damaged(path, f"version {version}")


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF" + bytes(8), b"GGML" + bytes(60), b"PK\x03\x04" * 20])
def test_no_gguf_at_all(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(content)
    assert_damaged(path, "magic")


def test_a_directory_and_a_missing_file(tmp_path: Path) -> None:
    (tmp_path / "directory.gguf").mkdir()
    assert_damaged(tmp_path / "directory.gguf", "directory")
    assert_damaged(tmp_path / "missing.gguf", "No such file")
