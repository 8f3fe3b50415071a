"""Reads surveys for the evaluation: positions and classes, without noise and withheld points."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from pointup.datasets.block_pairs import thin
from pointup.errors import DataError
from pointup.io.files import iter_points
from pointup.io.noise import CLASSIFICATION, attribute, is_noise, is_synthetic

MARGIN = 64.0
"""Width of the strip around a reference in which its source is upsampled, in mean point spacings of
the source. New points depend on measured points within about 20 local spacings."""
FEWEST_POINTS = 2
"""Fewest points of a source."""


@dataclass(frozen=True)
class Survey:
    """The points of a survey file, without noise (classes 7 and 18) and withheld points.

    Attributes:
        path: the file.
        positions: (N, 3) float64, in the unit of the file.
        classification: (N,) uint8; None if the file has no classes.
        notes: lines for the report about points that were left out, and about synthetic ones.
    """

    path: Path
    positions: np.ndarray
    classification: np.ndarray | None
    notes: tuple[str, ...] = ()

    def select(self, rows: np.ndarray) -> Survey:
        """The points of a mask (N,) bool or of indices, without notes."""
        classes = self.classification
        return Survey(self.path, self.positions[rows], None if classes is None else classes[rows])


def read_survey(path: Path, synthetic: Literal["note", "drop", "keep"] = "note") -> Survey:
    """Read a survey file.

    Points with the synthetic flag are no measurements. "note": they are kept, and a note says so.
    "drop": they are left out, as noise is. "keep": nothing is said, because the survey is the
    output of an upsampling. Raises FileError if the file can't be read, DataError if no point is
    left.
    """
    positions, classes = [], []
    num_points = num_noise = num_synthetic = 0
    for cloud in iter_points(path):
        noise = is_noise(cloud)
        made = is_synthetic(cloud) & ~noise
        num_noise += int(noise.sum())
        num_synthetic += int(made.sum())
        counts = ~(noise | made) if synthetic == "drop" else ~noise
        if (found := attribute(cloud, CLASSIFICATION)) is not None:
            classes.append(found[counts].astype(np.uint8))
        positions.append(cloud.positions[counts])
        num_points += len(cloud)
    kept = np.concatenate(positions)
    if not len(kept):
        kinds = "noise, withheld or synthetic" if synthetic == "drop" else "noise or withheld"
        raise DataError(f"{path}: all {num_points:,} points are {kinds}")
    notes = []
    if num_noise:
        notes.append(f"{path}: {num_noise:,} points left out: noise (classes 7 and 18) or withheld")
    if num_synthetic and synthetic != "keep":
        consequence = "left out" if synthetic == "drop" else "but count as measured here"
        notes.append(
            f"{path}: {num_synthetic:,} points have the synthetic flag: they are not measured, "
            f"{consequence}"
        )
    classification = np.concatenate(classes) if classes else None
    return Survey(path, kept, classification, tuple(notes))


def thin_survey(survey: Survey, ratio: float, pattern: str, seed: int) -> tuple[Survey, Survey]:
    """Split a survey into source and reference: the points thinned by `pattern`, and the others.

    The reference has `ratio` times as many points as the source. Raises DataError for too few
    points.
    """
    num_points = len(survey.positions)
    num_source = round(num_points / (ratio + 1))
    if num_source < FEWEST_POINTS:
        raise DataError(
            f"{survey.path}: {num_points:,} points thinned for a ratio of {ratio:g} leave "
            f"{num_source} for the source, which needs at least {FEWEST_POINTS}: give a smaller "
            "ratio or a survey with more points"
        )
    generator = np.random.default_rng(seed)
    is_source = np.zeros(num_points, dtype=bool)
    is_source[thin(survey.positions, ratio + 1, pattern, generator)] = True
    return survey.select(is_source), survey.select(~is_source)


def near_reference(source: Survey, reference: np.ndarray) -> Survey:
    """The points of a source within `MARGIN` of the bounding rectangle of a reference (R, 3).

    The rest of a larger source is too far away for the distances of new points there. It only
    decides which of several equal candidates are selected. The source itself, if it has no points
    beyond.
    """
    xy = source.positions[:, :2]
    sides = np.ptp(xy, axis=0)
    spacing = max(np.sqrt(sides.prod() / len(xy)), sides.max() / len(xy))
    low, high = reference[:, :2].min(axis=0), reference[:, :2].max(axis=0)
    margin = MARGIN * spacing
    near = ((xy >= low - margin) & (xy <= high + margin)).all(axis=1)
    return source if near.all() else source.select(near)
