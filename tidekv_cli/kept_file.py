"""The `--kept` file: which prompt positions each layer and head kept, as NumPy arrays."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tidekv_cli.errors import UsageError


class KeptFile:
    """An .npz file that appears whole or not at all."""

    def __init__(self, name: str) -> None:
        self._path = Path(name)
        self._scratch = self._path.parent / f".{self._path.name}.{os.getpid()}"

    def check(self) -> None:
        """Raise `UsageError` if it cannot be written: before the work, not after it."""
        if not self._path.name or os.path.isdir(self._path):
            raise UsageError(f"--kept {self._path} is a directory", "name a file")
        try:
            self._scratch.touch()
            self._scratch.unlink()
        except (OSError, ValueError) as error:
            raise self._unwritable(error) from error

    def write(self, ids: list[int], kept: list[Any]) -> None:
        """`prompt_ids` [S] int64, and positions [Hkv, K] int64 of layer n as `layer_00n`."""
        import numpy as np

        arrays: dict[str, Any] = {
            "prompt_ids": np.array(ids, dtype=np.int64),
            **{f"layer_{layer:03d}": indices.cpu().numpy() for layer, indices in enumerate(kept)},
        }
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
