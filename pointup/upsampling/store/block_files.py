"""Files between the phases of a pass, one for each block and phase."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pointup.io.cloud import os_errors


@dataclass(frozen=True)
class BlockFiles:
    """Arrays by name, for each block and for what they are."""

    directory: Path

    def save(self, block: int, what: str, **arrays: np.ndarray) -> None:
        path = self._path(block, what)
        with os_errors(path, "written"):
            np.savez(path, **arrays)  # type: ignore[arg-type]

    def load(self, block: int, what: str) -> Any:
        """What was saved, to be opened with `with`; each array is read when it is asked for."""
        path = self._path(block, what)
        with os_errors(path, "read"):
            return np.load(path)

    def delete(self, block: int, what: str) -> None:
        self._path(block, what).unlink()

    def _path(self, block: int, what: str) -> Path:
        return self.directory / f"{what}_{block}.npz"
