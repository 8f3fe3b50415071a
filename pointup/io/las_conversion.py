"""Converts the attributes of other formats to the standard dimensions of LAS."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import laspy
import numpy as np
from laspy.header import GpsTimeType

from pointup.io.cloud import PointCloud, check_positions, warn_once
from pointup.io.noise import plain_name

COLOURS = ("red", "green", "blue")
LARGEST_8_BIT, LARGEST_16_BIT = 255, 65_535
SCAN_ANGLE_STEP = 0.006
"""Unit in degrees of the scan angles of point formats 6 and above; other programs write degrees."""
SECONDS_OF_WEEK = 604_800
POINT_FORMAT = 8
"""The point format with all standard dimensions."""
ALIASES = {"scananglerank": "scan_angle", "infrared": "nir"}
"""Names of PDAL, CloudCompare and older point formats, without underscores, of dimensions."""
SHORT_COLOURS = dict(zip("rgb", COLOURS, strict=True))
# Coordinate steps per extent: 0.1 mm in a kilometre. At most 1 mm, while an int32 has half an
# extent left on each side: new points may lie outside of the measured ones.
STEPS_PER_EXTENT, COARSE_STEP, MOST_STEPS = 1e7, 1e-3, 2.0**31
# The offset is a multiple of a million steps.
OFFSET_DIGITS = 6


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
    as LAS requires. Columns R, G and B are colours. Scan angles are degrees if they are floats or
    named ScanAngleRank. The attributes of `like` hold at least their smallest and largest values.

    Attributes:
        ranges: smallest and largest value (2,) of the converted attributes of `like`.
    """

    def __init__(self, like: PointCloud) -> None:
        standard = {
            _plain(name): name for name in laspy.PointFormat(POINT_FORMAT).standard_dimension_names
        } | ALIASES
        # A single column R may be anything.
        if SHORT_COLOURS.keys() <= {_plain(name) for name in like.attributes}:
            standard |= SHORT_COLOURS
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
        is_rank = any(
            known == "scan_angle" and _plain(name) in ALIASES for name, known in self._names.items()
        )
        if "scan_angle" in ranges and (is_rank or ranges["scan_angle"].dtype.kind == "f"):
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


def with_returns(attributes: Mapping[str, np.ndarray], num_points: int) -> dict[str, np.ndarray]:
    """The attributes with return numbers: LAS counts from 1, and an only return is 1 of 1."""
    number = attributes.get("return_number", np.ones(num_points, np.uint8))
    return {"return_number": number, "number_of_returns": number} | dict(attributes)


def new_header(positions: np.ndarray, ranges: Mapping[str, np.ndarray]) -> laspy.LasHeader:
    """The header of a LAS 1.4 file for converted attributes, with a scale for its extent.

    The scale, that of all axes, is a power of ten near 1e-7 of the extent of `positions` (N, 3),
    but 0.001 for more than 10 km, or the smallest of 0.002, 0.005, 0.01, ... that the extent
    allows. `ranges` are those of `LasConversion`.
    """
    point_format = 8 if "nir" in ranges else 7 if ranges.keys() & set(COLOURS) else 6
    header = laspy.LasHeader(version="1.4", point_format=point_format)
    header.global_encoding.wkt = True
    times = ranges.get("gps_time")
    # Standard times count from September 2011, and are negative before.
    if times is not None and (times[0] < 0 or times[1] > SECONDS_OF_WEEK):
        header.global_encoding.gps_time_type = GpsTimeType.STANDARD
    check_positions(positions, "points to write")
    low, high = positions.min(axis=0), positions.max(axis=0)
    extent = float((high - low).max()) or 1.0
    exponent = int(np.floor(np.log10(min(extent / STEPS_PER_EXTENT, COARSE_STEP))))
    # Not finer than the coordinates themselves.
    finest = float(np.spacing(np.abs(positions).max()))
    exponent = max(exponent, int(np.ceil(np.log10(finest))))
    factor = 1
    while factor * 10.0**exponent * MOST_STEPS < extent:
        exponent, factor = (exponent + 1, 1) if factor == 5 else (exponent, {1: 2, 2: 5}[factor])
    header.scales = np.full(3, factor * 10.0**exponent)
    # Few digits, so that coordinates in the steps of the scale keep theirs.
    header.offsets = np.round((low + high) / 2, -exponent - OFFSET_DIGITS)
    return header


def note_coarse_steps(path: Path, step: float, positions: np.ndarray) -> None:
    """Log a warning if the steps of coordinates are coarser than 1 mm in a survey in metres."""
    if step > COARSE_STEP:
        extent = np.ptp(positions, axis=0).max()
        warn_once(
            f"{path}: coordinates are rounded to multiples of {step:g}, the smallest that LAS has "
            f"for an extent of {extent:g}; remove points that lie far from all others, or write "
            "another format"
        )


def _plain(name: str) -> str:
    return plain_name(name).replace("_", "").replace(" ", "")


def _factor(values: np.ndarray, is_colour: bool) -> int:
    largest = values.max()
    if values.dtype.kind == "f" and largest <= 1:
        return LARGEST_16_BIT
    return LARGEST_8_BIT + 1 if is_colour and largest <= LARGEST_8_BIT else 1
