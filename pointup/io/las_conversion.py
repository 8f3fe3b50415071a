"""Converts the attributes of other formats to the standard dimensions of LAS."""

from __future__ import annotations

from collections.abc import Mapping

import laspy
import numpy as np

from pointup.io.cloud import PointCloud
from pointup.io.noise import plain_name

COLOURS = ("red", "green", "blue")
LARGEST_8_BIT, LARGEST_16_BIT = 255, 65_535
SCAN_ANGLE_STEP = 0.006
"""Unit in degrees of the scan angles of point formats 6 and above; other programs write degrees."""
SECONDS_OF_WEEK = 604_800
POINT_FORMAT = 8
"""The point format with all standard dimensions."""


def extremes(attributes: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Smallest and largest value (2,) of each attribute.

    Attributes with several values for each point, and those that are not numbers, are left out.
    """
    return {
        name: np.array([values.min(), values.max()])
        for name, values in attributes.items()
        if values.ndim == 1 and len(values) and values.dtype.kind in "biuf"
    }


class LasConversion:
    """How the attributes of a cloud of another format become standard dimensions of LAS.

    Names match whatever their case and underscores: `Classification`, `ReturnNumber`. Intensities
    and colours from 0 to 1 with fractions are multiplied by 65,535, and colours up to 255 by 256,
    as LAS requires. Scan angles that are floats are degrees. The attributes of `like` hold at least
    their smallest and largest values.

    Attributes:
        ranges: smallest and largest value (2,) of the converted attributes of `like`.
    """

    def __init__(self, like: PointCloud) -> None:
        standard = {
            _plain(name): name for name in laspy.PointFormat(POINT_FORMAT).standard_dimension_names
        }
        self._names: dict[str, str] = {}
        for name in like.attributes:
            known = standard.get(_plain(name), name)
            is_taken = known in like.attributes or known in self._names.values()
            self._names[name] = name if is_taken else known
        ranges = extremes(self._renamed(like.attributes))
        colours = [ranges[name] for name in COLOURS if name in ranges]
        self._factors: dict[str, float] = {}
        if colours:
            factor = _factor(np.concatenate(colours), is_colour=True)
            self._factors = dict.fromkeys(COLOURS, factor)
        if "intensity" in ranges:
            self._factors["intensity"] = _factor(ranges["intensity"], is_colour=False)
        if "scan_angle" in ranges and ranges["scan_angle"].dtype.kind == "f":
            self._factors["scan_angle"] = 1 / SCAN_ANGLE_STEP
        self.ranges = extremes(self.attributes(like.attributes))

    def attributes(self, attributes: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The attributes of some points, with names and values of LAS."""
        converted = self._renamed(attributes)
        for name, factor in self._factors.items():
            if name in converted and factor != 1:
                converted[name] = converted[name].astype(np.float64) * factor
        return converted

    def _renamed(self, attributes: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {self._names.get(name, name): values for name, values in attributes.items()}


def _plain(name: str) -> str:
    return plain_name(name).replace("_", "").replace(" ", "")


def _factor(values: np.ndarray, is_colour: bool) -> int:
    largest = values.max()
    if values.dtype.kind == "f" and largest <= 1:
        return LARGEST_16_BIT
    return LARGEST_8_BIT + 1 if is_colour and largest <= LARGEST_8_BIT else 1
