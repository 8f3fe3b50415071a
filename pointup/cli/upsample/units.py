"""Checks the units of length of the files of `pointup upsample`, before any work."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pointup.cli.mixed_units import note_mixed
from pointup.io.length_unit import (
    LengthUnit,
    agreed_unit,
    mercator_stretch,
    names_geocentric,
    units_of_readable,
)


def check_units(paths: Sequence[Path], density: float | None, has_lengths: bool) -> list[str]:
    """Check that coordinates are lengths. Returns notes on units that the user may not expect.

    With a density, or with other lengths among the options (`has_lengths`), all files must have one
    unit; without, each may have its own. A damaged file is skipped: it is reported when it is read.
    Many surveys name a unit of heights that theirs are not in: mixed units are noted, not refused.
    So are Mercator and geocentric systems, because some files name the latter by mistake.
    Raises DataError for coordinates in degrees or in several units.
    """
    units = units_of_readable(paths)
    lengths, notes = note_mixed(units)
    notes += _projection_notes(list(units))
    if density is None and not has_lengths:
        for path, unit in lengths.items():
            agreed_unit({path: unit})
        return notes
    unit = agreed_unit(lengths)
    return notes if density is None else [*notes, *_density_note(density, unit)]


def _projection_notes(paths: Sequence[Path]) -> list[str]:
    """A note on the first file in a Mercator projection or with geocentric coordinates; other files
    are often its neighbours."""
    for path in paths:
        if names_geocentric(path):
            return [
                f"{path}: by its coordinate system, coordinates are geocentric, so that z is no "
                "height; if they are, reproject it, for example to UTM"
            ]
        stretch = mercator_stretch(path)
        if stretch is not None:
            return [
                f"{path}: is in a Mercator projection, where lengths are {stretch:.3g} times those "
                "on the ground, but heights are not; reproject it, for example to UTM"
            ]
    return []


def _density_note(density: float, unit: LengthUnit) -> list[str]:
    if unit.metres is None or unit.metres == 1:
        return []
    per_square_metre = density / unit.metres**2
    return [
        f"the files are in {unit.name}: --density {density:g} is points per square {unit.name}, "
        f"{per_square_metre:.4g} points per square metre"
    ]
