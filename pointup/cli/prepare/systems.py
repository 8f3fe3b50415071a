"""Checks the units and coordinate systems of the surveys of a new dataset, before any work."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from pointup.cli.coordinate_systems import notes_on_systems
from pointup.cli.mixed_units import note_mixed
from pointup.cli.prepare.summary import note


def check_systems(sides: Sequence[Sequence[Path]], separate: bool) -> None:
    """Print notes on mixed units and on files that are paired but in different systems.

    `sides` has one survey or two. If the files are separate surveys, only the two files of a pair
    are compared, and only the first note is printed: others are often the same.
    A damaged file is skipped: it is left out and reported when it is read.
    Raises DataError for files in different units, or in degrees.
    """
    from pointup.io.length_unit import agreed_unit, units_of_readable

    paths = list(chain.from_iterable(sides))
    lengths, notes = note_mixed(units_of_readable(paths))
    agreed_unit(lengths)
    for text in notes:
        note(text)
    for surveys in zip(*sides, strict=True) if separate else [paths]:
        for text in (found := notes_on_systems(surveys)):
            note(text)
        if found:
            break
