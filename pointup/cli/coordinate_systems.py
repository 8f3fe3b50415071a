"""Notes on files that are compared, but are in different coordinate systems by their headers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pointup.io.length_unit import LengthUnit


def notes_on_systems(paths: Sequence[Path]) -> list[str]:
    """A note on the first file of each further horizontal coordinate system.

    Such files are not refused: a header may name a system by mistake.
    """
    from pointup.io.length_unit import different_systems

    (first, system), *others = list(different_systems(paths).items()) or [(Path(), "")]
    return [
        f"{path}: is in {other} by its header, and {first} in {system}; coordinates are compared "
        "as if they were in the same system. Reproject one of them if they are not"
        for path, other in others
    ]


def note_mixed(units: Mapping[Path, LengthUnit]) -> tuple[dict[Path, LengthUnit], list[str]]:
    """The units without mixed ones, and a note on each file that has these.

    Such files are not refused: many surveys name a unit of heights that theirs are not in.
    """
    from pointup.io.length_unit import MIXED

    lengths = {path: unit for path, unit in units.items() if unit != MIXED}
    notes = [
        f"{path}: by its coordinate system, heights are in another unit than x and y; distances "
        "are computed as if they were in the same one. Convert the heights first if they are not"
        for path, unit in units.items()
        if unit == MIXED
    ]
    return lengths, notes
