"""Notes on files that are compared, but are in different coordinate systems by their headers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def notes_on_systems(paths: Sequence[Path]) -> list[str]:
    """A note on the first file of each further horizontal coordinate system.

    Such files are not refused: a header may name a system by mistake.
    """
    from pointup.io.coordinate_systems import different_systems

    (first, system), *others = list(different_systems(paths).items()) or [(Path(), "")]
    return [
        f"{path}: is in {other} by its header, and {first} in {system}; coordinates are compared "
        "as if they were in the same system. Reproject one of them if they are not"
        for path, other in others
    ]
