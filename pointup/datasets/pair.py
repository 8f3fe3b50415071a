"""A training pair: a sparse source cloud and a dense target cloud."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pointup.errors import DataError
from pointup.geometry.grids import in_box

POINT_COLUMNS = ("source", "target", "target_normals", "resample")


@dataclass
class Pair:
    """A sparse source and a dense target cloud, relative to a common origin.

    The points need not correspond, and the number of points of each cloud is arbitrary.

    Attributes:
        name: unique in its dataset; messages name samples by it.
        source, target: (N, 3) and (M, 3) float32, relative to `origin`.
        origin: (3,) float64; origin + points are the coordinates of the input file.
        target_normals: (M, 3) unit normals of the target.
        resample: (K, 3) a second, independent sampling of the true surface. Evaluations compare it
            with the target as the "resampled ground truth".
        vertical: True if z is up; augmentation then rotates the pair about z only.
        surface: file name of the true surface in `surfaces/` of the dataset; "" without one. Its
            vertices are relative to `origin`, too.
        core: (2, 2) float64, lower and upper corner in x and y, in the coordinates of the file, of
            the ground on which the pair is measured; its clouds reach beyond. None: all of them.
    """

    name: str
    source: np.ndarray
    target: np.ndarray
    origin: np.ndarray = field(default_factory=lambda: np.zeros(3))
    target_normals: np.ndarray | None = None
    resample: np.ndarray | None = None
    vertical: bool = True
    surface: str = ""
    core: np.ndarray | None = None

    @property
    def num_points(self) -> int:
        """Points of source and target on the core."""
        if self.core is None:
            return len(self.source) + len(self.target)
        box = self.core - self.origin[:2]
        return int(is_within(self.source, box).sum() + is_within(self.target, box).sum())

    @classmethod
    def centred(cls, name: str, source: np.ndarray, target: np.ndarray, **others: Any) -> Pair:
        """A pair of clouds in the coordinates of their file; its origin is the mean of the source.

        `others` are further attributes of the pair.
        """
        clouds = [np.asarray(points, dtype=np.float64) for points in (source, target)]
        origin = clouds[0].mean(axis=0)
        source, target = ((points - origin).astype(np.float32) for points in clouds)
        return cls(name, source, target, origin, **others)

    def clouds(self) -> dict[str, np.ndarray]:
        """The points by column, (0, 3) for missing ones. Raises DataError for a wrong shape."""
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


def is_within(points: np.ndarray, box: np.ndarray, margin: float = 0.0) -> np.ndarray:
    """Mask (N,) of the points (N, 2 or more) in a box (2, 2) in x and y, or near it."""
    return in_box(points, box[0] - margin, box[1] + margin)


def surface_path(dataset: str | Path, name: str) -> Path:
    """The path of the surface file `name` of a dataset, in its folder `surfaces`.

    Raises DataError for a name that leads out of that folder: through "..", as an absolute path, or
    through a symbolic link.
    """
    folder = Path(dataset) / "surfaces"
    path = folder / name
    try:
        resolved = path.resolve()
        # From Python 3.13 on a loop of links resolves to a link; before, it raises RuntimeError.
        is_inside = resolved.is_relative_to(folder.resolve()) and not resolved.is_symlink()
    # ValueError for a null byte.
    except (OSError, ValueError, RuntimeError):
        is_inside = False
    if not is_inside:
        raise DataError(
            f"{dataset}: the surface {name!r} is not a file in its folder surfaces/; make the "
            "dataset again"
        )
    return path
