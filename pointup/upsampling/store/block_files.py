"""Intermediate files of a pass: arrays of one block and one phase in each file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pointup.io.cloud import os_errors


@dataclass(frozen=True)
class BlockFiles:
    """Saves and loads named arrays of a block; `what` is the kind of file, such as "candidates"."""

    directory: Path

    def save(self, block: int, what: str, **arrays: np.ndarray) -> None:
        path = self._path(block, what)
        with os_errors(path, "written"):
            np.savez(path, **arrays)  # type: ignore[arg-type]

    def load(self, block: int, what: str) -> Any:
        """The arrays of a block, for a `with` statement; an array is read when it is indexed."""
        path = self._path(block, what)
        with os_errors(path, "read"):
            return np.load(path)

    def delete(self, block: int, what: str) -> None:
        self._path(block, what).unlink()

    def _path(self, block: int, what: str) -> Path:
        return self.directory / f"{what}_{block}.npz"
