"""A GGUF file: its metadata and where each tensor lies. Reads headers only; knows no torch and no model.

Source: the GGUF v2/v3 format description of the ggml project. Tensor data stay in the file until asked for.
"""

from __future__ import annotations

import mmap
import reprlib
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidekv_cli.errors import ModelError

_MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_REQUIRED: Any = object()


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: `shape` in torch order (rows first), `start` and `nbytes` in bytes of the file."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """Metadata by key and tensors by name of one file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorEntry]

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the model family, for example `llama`."""
        return str(self.value("general.architecture", str, ""))

    def value(self, key: str, kind: type, default: Any = _REQUIRED) -> Any:
        """The metadata of `key`, which must be an int, float, str, bool or list as `kind` says.

        Returns `default` where the file has no such key; without a default that raises `ModelError`, as does a value
        of another type.
        """
        found = self.metadata.get(key, default)
        if found is _REQUIRED:
            raise ModelError(f"the header of {self.path} lacks {key}", "use a complete GGUF file")
        if kind is float and type(found) is int:
            return float(found)
        if key in self.metadata and type(found) is not kind:
            raise ModelError(
                f"{self.path} has {key}: {reprlib.repr(found)}, which is no {kind.__name__}",
                "fetch or copy the file again",
            )
        return found

    def values(self, key: str, kind: type, default: Any = _REQUIRED) -> list[Any]:
        """The same for a list whose items are all of `kind`."""
        found = self.value(key, list, default)
        wrong = next((item for item in found if type(item) is not kind), None)
        if wrong is not None:
            raise ModelError(
                f"{self.path} has {key} with {reprlib.repr(wrong)}, which is no {kind.__name__}",
                "fetch or copy the file again",
            )
        return list(found)


def read_gguf(path: Path) -> GgufFile:
    """Parse the header of `path`.

    Raises `ModelError` if the file is missing, no GGUF, truncated, or holds a tensor type that is not known.
    """
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            if size < 24 or file.read(4) != _MAGIC:
                raise _damaged(path, "it does not start with the GGUF magic bytes")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as blob:
                return _parse(path, blob, size)
    except OSError as error:
        raise ModelError(
            f"cannot read the model file {path}: {error.strerror or error}",
            "check the path and its permissions",
        ) from error
    except (struct.error, IndexError, OverflowError, ValueError, RecursionError) as error:
        raise _damaged(path, "its header ends early or is malformed") from error


def _damaged(path: Path, reason: str) -> ModelError:
    return ModelError(f"the model file {path} is damaged: {reason}", "fetch or copy the file again")


def _parse(path: Path, blob: mmap.mmap, size: int) -> GgufFile:
    reader = _Reader(blob, size)
    version = reader.scalar("I")
    if version not in (2, 3):
        raise ModelError(
            f"{path} is GGUF version {version}; versions 2 and 3 are supported",
            "convert it with a newer llama.cpp",
        )
    tensor_count, key_count = reader.scalar("Q"), reader.scalar("Q")
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        key = reader.string()
        metadata[key] = reader.value(reader.scalar("I"))
    headers = [reader.tensor_header() for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1:
        raise _damaged(path, f"its alignment is {reprlib.repr(alignment)}")
    base = -(-reader.position // alignment) * alignment
    tensors: dict[str, TensorEntry] = {}
    for name, dims, type_id, offset in headers:
        nbytes = _tensor_bytes(path, name, dims, type_id)
        if base + offset + nbytes > size:
            missing = base + offset + nbytes - size
            raise _damaged(path, f"it is truncated, tensor {name!r} ends {missing} bytes after the file")
        tensors[name] = TensorEntry(name, dims[::-1], type_id, base + offset, nbytes)
    return GgufFile(path, metadata, tensors)


def _tensor_bytes(path: Path, name: str, dims: tuple[int, ...], type_id: int) -> int:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(type_id)]
    except (ValueError, KeyError) as error:
        raise ModelError(
            f"tensor {name!r} in {path} has GGML type {type_id}, which is not known",
            "use a file quantised with one of the usual types, for example Q8_0 or Q4_K_M",
        ) from error
    elements = 1
    for dim in dims:
        elements *= dim
    if not dims or dims[0] % block:
        raise _damaged(path, f"tensor {name!r} has rows that are no multiple of {block}")
    return int(elements // block * block_bytes)


class _Reader:
    """A cursor over the mapped header, checking every length against the file's size."""

    def __init__(self, blob: mmap.mmap, size: int) -> None:
        self._blob, self._size, self.position = blob, size, 4

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._blob, self.position)
        self.position += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        end = self.position + length
        if end > self._size:
            raise IndexError(end)
        text = self._blob[self.position : end].decode("utf-8", "surrogateescape")
        self.position = end
        return text

    def value(self, type_id: int) -> Any:
        if type_id in _SCALARS:
            return self.scalar(_SCALARS[type_id])
        if type_id == _STRING:
            return self.string()
        if type_id != _ARRAY:
            raise ValueError(type_id)
        item, count = self.scalar("I"), self.scalar("Q")
        if count > self._size:
            raise IndexError(count)
        if item not in _SCALARS:
            return [self.value(item) for _ in range(count)]
        layout = f"<{count}{_SCALARS[item]}"
        values = struct.unpack_from(layout, self._blob, self.position)
        self.position += struct.calcsize(layout)
        return list(values)

    def tensor_header(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        rank = self.scalar("I")
        dims = tuple(self.scalar("Q") for _ in range(min(rank, 8)))
        return name, dims, self.scalar("I"), self.scalar("Q")
