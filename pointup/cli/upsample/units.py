"""Checks the units of length of the files of `pointup upsample`, before any work."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pointup.io.length_unit import LengthUnit, common_unit


def check_units(paths: Sequence[Path], density: float | None, has_lengths: bool) -> str | None:
    """Check that coordinates are lengths. Returns a note on a density that is not per square metre.

    With a density, or with other lengths among the options (`has_lengths`), all files must have one
    unit; without, each may have its own. A damaged file is skipped: it is reported when it is read.
    Raises DataError for coordinates in degrees or in several units.
    """
    if density is None and not has_lengths:
        for path in paths:
            common_unit([path], skips_damaged=True)
        return None
    unit = common_unit(paths, skips_damaged=True)
    return None if density is None else _density_note(density, unit)


def _density_note(density: float, unit: LengthUnit) -> str | None:
    if unit.metres is None or unit.metres == 1:
        return None
    per_square_metre = density / unit.metres**2
    return (
        f"the files are in {unit.name}: --density {density:g} is points per square {unit.name}, "
        f"{per_square_metre:.4g} points per square metre"
    )
