"""The base class of writers for formats with a fixed set of columns: E57, PTS, KITTI."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pointup.errors import DataError
from pointup.io.cloud import (
    ExtraDimension,
    PointCloud,
    PointWriter,
    flatten_attributes,
    warn_once,
)


class FixedColumnWriter(PointWriter):
    """Writer of a format that has the columns `supported` and no others.

    A warning names the attributes of `like` that are left out.
    """

    supported: tuple[str, ...] = ()

    def __init__(
        self, path: Path, like: PointCloud, extra_dimensions: Sequence[ExtraDimension] = ()
    ) -> None:
        super().__init__(path)
        flat = flatten_attributes(like.attributes)
        names = dict.fromkeys([*flat, *(added.name for added in extra_dimensions)])
        self.columns = [name for name in self.supported if name in names]
        if left_out := [name for name in names if name not in self.supported]:
            warn_once(
                f"{path}: {path.suffix} files can't store {', '.join(left_out)}; left out (LAS, "
                "PLY, PCD and CSV store them)"
            )

    def _append(self, positions: np.ndarray, attributes: dict[str, np.ndarray]) -> None:
        flat = flatten_attributes(attributes)
        for name in self.columns:
            if name not in flat:
                raise DataError(f"{self.path}: all points need the same attributes; no {name}")
        self._append_columns(positions, {name: flat[name] for name in self.columns})

    @abstractmethod
    def _append_columns(self, positions: np.ndarray, columns: dict[str, np.ndarray]) -> None:
        """Write points (N, 3) float64 and `columns` (N,), in the order of `supported`."""
