"""Finds points that are no measurements of a survey: noise, withheld points, synthetic ones."""

from __future__ import annotations

import numpy as np

from pointup.io.cloud import PointCloud

NOISE_CLASSES = (7, 18)
"""ASPRS classes of low and high noise."""
CLASSIFICATION, WITHHELD, SYNTHETIC = "classification", "withheld", "synthetic"


def is_noise(cloud: PointCloud) -> np.ndarray:
    """Mask (N,) bool of the points of a noise class and of withheld points."""
    noise = np.zeros(len(cloud), bool)
    classes, withheld = attribute(cloud, CLASSIFICATION), attribute(cloud, WITHHELD)
    if classes is not None:
        noise |= np.isin(classes, NOISE_CLASSES)
    if withheld is not None:
        noise |= withheld != 0
    return noise


def is_synthetic(cloud: PointCloud) -> np.ndarray:
    """Mask (N,) bool of the points with the synthetic flag, such as new points of an upsampling."""
    synthetic = attribute(cloud, SYNTHETIC)
    return np.zeros(len(cloud), bool) if synthetic is None else synthetic != 0


def plain_name(name: str) -> str:
    """The name of an attribute as in LAS: other programs write Classification, scalar_Intensity."""
    return name.lower().removeprefix("scalar_")


def attribute(cloud: PointCloud, name: str) -> np.ndarray | None:
    """A scalar attribute (N,) by its `plain_name`; None if there is none."""
    for known, values in cloud.attributes.items():
        if plain_name(known) == name and values.ndim == 1:
            return values
    return None


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
