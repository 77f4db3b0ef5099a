"""The `--kept` file: which prompt positions each layer and head kept, as NumPy arrays."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tidekv_cli.errors import UsageError


class KeptFile:
    """An .npz file that appears whole or not at all."""

    def __init__(self, name: str) -> None:
        """`name` as the user gave it; a link is written through."""
        self._path = Path(os.path.realpath(name)) if "\0" not in name else Path(name)
        self._scratch = self._path.parent / f".tidekv-kept-{os.getpid()}"

    def check(self, inputs: Sequence[str | Path]) -> None:
        """Raise `UsageError` if it cannot be written, or is one of `inputs`: before the work, not after it."""
        if os.path.exists(self._path) and not os.path.isfile(self._path):
            raise UsageError(f"--kept {self._path} is no file but a directory or a device", "name a file")
        if any(os.path.realpath(name) == str(self._path) for name in inputs if "\0" not in str(name)):
            raise UsageError(f"--kept {self._path} would overwrite what is read", "name another file")
        try:
            with suppress(FileNotFoundError):
                os.lstat(self._path)  # a name that is too long
            self._scratch.touch()
            self._scratch.unlink()
        except (OSError, ValueError) as error:
            raise self._unwritable(error) from error

    def write(self, ids: list[int], kept: list[Any]) -> None:
        """`prompt_ids` [S] int64, and positions [Hkv, K] int64 of layer n as `layer_00n`.

        Where heads keep different numbers, `layer_00n_values` are the positions head after head, and
        `layer_00n_offsets` [Hkv + 1] where each head's begin.
        """
        import numpy as np

        arrays: dict[str, Any] = {"prompt_ids": np.array(ids, dtype=np.int64)}
        for layer, found in enumerate(kept):
            name = f"layer_{layer:03d}"
            if isinstance(found, list):
                heads = [positions.cpu().numpy() for positions in found]
                arrays[f"{name}_values"] = np.concatenate(heads)
                arrays[f"{name}_offsets"] = np.cumsum([0, *map(len, heads)], dtype=np.int64)
            else:
                arrays[name] = found.cpu().numpy()
        try:
            with self._scratch.open("wb") as file:
                np.savez(file, **arrays)
            os.replace(self._scratch, self._path)
        except OSError as error:
            raise self._unwritable(error) from error
        finally:
            self._scratch.unlink(missing_ok=True)

    def _unwritable(self, error: OSError | ValueError) -> UsageError:
        reason = error.strerror if isinstance(error, OSError) else error
        return UsageError(
            f"--kept {self._path} cannot be written: {reason}", "name a file in a directory with room to write"
        )
