"""A pair: a sparse cloud and the dense cloud that it should become."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pointup.datasets.columns import POINT_COLUMNS
from pointup.errors import DataError


@dataclass
class Pair:
    """A sparse cloud and the dense cloud that it should become, relative to a common origin.

    The points need not correspond, and their numbers are free.

    Attributes:
        name: unique in its dataset; messages name samples by it.
        source, target: (N, 3) and (M, 3) float32, relative to `origin`.
        origin: (3,) float64, what to add for the coordinates of the file the pair came from.
        target_normals: (M, 3) unit normals of the target.
        resample: (K, 3) a second, independent sampling of the true surface: every metric's floor.
        vertical: z is up, so that augmentation turns the pair about the vertical only.
        surface: file name of the true surface below `surfaces/` of the dataset.
    """

    name: str
    source: np.ndarray
    target: np.ndarray
    origin: np.ndarray = field(default_factory=lambda: np.zeros(3))
    target_normals: np.ndarray | None = None
    resample: np.ndarray | None = None
    vertical: bool = True
    surface: str = ""

    def clouds(self) -> dict[str, np.ndarray]:
        """Its points by column, (0, 3) for what it does not have; DataError for a wrong shape."""
        clouds = {}
        for column in POINT_COLUMNS:
            value = getattr(self, column)
            points = np.empty((0, 3), np.float32) if value is None else np.asarray(value)
            if points.ndim != 2 or points.shape[1] != 3:
                raise DataError(f"{self.name}: {column} has shape {points.shape}; expected (N, 3)")
            clouds[column] = points
        num_normals = len(clouds["target_normals"])
        if self.target_normals is not None and num_normals != len(clouds["target"]):
            raise DataError(
                f"{self.name}: {num_normals} normals for {len(clouds['target'])} target points"
            )
        return clouds


def surface_path(dataset: str | Path, name: str) -> Path:
    """File of a true surface, which a pair names below `surfaces/` of its dataset.

    Raises DataError for a name that leads out of that folder: by "..", from the root, or by a
    symbolic link.
    """
    root = Path(dataset)
    path = root / "surfaces" / name
    try:
        inside = path.resolve().is_relative_to(root.resolve() / "surfaces")
    # A null byte, and what Python 3.11 and 3.12 raise for links that lead to each other.
    except (OSError, ValueError, RuntimeError):
        inside = False
    if not inside:
        raise DataError(
            f"{dataset}: the surface {name!r} is not a file in its folder surfaces/; make the "
            "dataset again"
        )
    return path
