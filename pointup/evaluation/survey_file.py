"""Reads surveys for the evaluation: positions and classes, without noise and withheld points."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pointup.datasets.thinning_patterns import thin
from pointup.errors import DataError
from pointup.io.files import iter_points
from pointup.io.noise import CLASSIFICATION, attribute, is_noise


@dataclass(frozen=True)
class Survey:
    """The points of a survey file, without noise (classes 7 and 18) and withheld points.

    Attributes:
        path: the file.
        positions: (N, 3) float64, in the unit of the file.
        classification: (N,) uint8; None if the file has no classes.
        num_left_out: number of noise and withheld points, which are left out.
    """

    path: Path
    positions: np.ndarray
    classification: np.ndarray | None
    num_left_out: int = 0
    left_out = "points left out: noise (classes 7 and 18) or withheld"


def read_survey(path: Path) -> Survey:
    """Read a survey file. Raises FileError if it can't be read, DataError if all of it is noise."""
    positions, classes, num_points = [], [], 0
    for cloud in iter_points(path):
        counts = ~is_noise(cloud)
        if (found := attribute(cloud, CLASSIFICATION)) is not None:
            classes.append(found[counts].astype(np.uint8))
        positions.append(cloud.positions[counts])
        num_points += len(cloud)
    kept = np.concatenate(positions)
    if not len(kept):
        raise DataError(f"{path}: all {num_points:,} points are noise or withheld")
    classification = np.concatenate(classes) if classes else None
    return Survey(path, kept, classification, num_points - len(kept))


def thin_survey(survey: Survey, ratio: float, pattern: str, seed: int) -> tuple[Survey, Survey]:
    """Split a survey into source and reference: the points thinned by `pattern`, and the others.

    The reference has `ratio` times as many points as the source.
    """
    generator = np.random.default_rng(seed)
    kept = thin(survey.positions, ratio + 1, pattern, generator)
    is_source = np.zeros(len(survey.positions), dtype=bool)
    is_source[kept] = True

    def part(rows: np.ndarray) -> Survey:
        classes = survey.classification
        return Survey(
            survey.path, survey.positions[rows], None if classes is None else classes[rows]
        )

    return part(is_source), part(~is_source)
