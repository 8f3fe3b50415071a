"""Notes on files whose heights are, by their coordinate system, in another unit than x and y."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pointup.io.length_unit import MIXED, LengthUnit


def note_mixed(units: Mapping[Path, LengthUnit]) -> tuple[dict[Path, LengthUnit], list[str]]:
    """The units without mixed ones, and a note on each file that has these.

    Such files are not refused: many surveys name a unit of heights that theirs are not in.
    """
    lengths = {path: unit for path, unit in units.items() if unit != MIXED}
    notes = [
        f"{path}: by its coordinate system, heights are in another unit than x and y; distances "
        "are computed as if they were in the same one. Convert the heights first if they are not"
        for path, unit in units.items()
        if unit == MIXED
    ]
    return lengths, notes
