"""Tells the vegetation of a survey by the classes of its points, or by the returns of a pulse."""

from __future__ import annotations

import numpy as np

from pointup.io.cloud import PointCloud
from pointup.io.noise import CLASSIFICATION, attribute

VEGETATION_CLASSES = (3, 4, 5)
"""ASPRS classes of low, medium and high vegetation."""
NUMBER_OF_RETURNS = "number_of_returns"
_UNCLASSIFIED = (0, 1)


def is_vegetation(cloud: PointCloud) -> np.ndarray:
    """Mask (N,) bool of the points of a vegetation class.

    Where no point has a class, it is that of the points whose pulse had several returns: leaves let
    a part of a pulse through, and surfaces do not. A cloud with neither attribute has none.
    """
    classes = attribute(cloud, CLASSIFICATION)
    if classes is not None and not np.isin(classes, _UNCLASSIFIED).all():
        return np.isin(classes, VEGETATION_CLASSES)
    number = attribute(cloud, NUMBER_OF_RETURNS)
    return np.zeros(len(cloud), bool) if number is None else number > 1
