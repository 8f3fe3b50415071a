"""Options for the tiles of a survey, of `pointup prepare pairs` and `pointup prepare thin`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import tyro

from pointup.cli.prepare.summary import note
from pointup.errors import ConfigError

if TYPE_CHECKING:
    from pointup.datasets.surveys import Place


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """Tiles of a survey. Lengths are in the unit of the files."""

    tile: float = 10.0
    """Side length of a tile, in the unit of the files."""
    min_points: int = 32
    """Leave out tiles with fewer points than this in source or target."""
    block: int = 4
    """Side length in tiles of the squares that belong to training or validation as a whole."""
    strip: Annotated[
        float | None, tyro.conf.arg(metavar="LENGTH", help_behavior_hint="(optional)")
    ] = None
    """Width of the strip of left-out points around validation tiles, in the unit of the files. No
    training point is closer to a validation point. By default half a tile."""
    separate: bool = False
    """Treat each file as a separate survey, with coordinates of its own."""
    include_noise: bool = False
    """Keep noise (classes 7 and 18), withheld points, and points with the synthetic flag, which are
    not measured. By default they are left out."""

    def __post_init__(self) -> None:
        if not self.tile > 0 or self.min_points < 1 or self.block < 1:
            raise ConfigError(
                f"--tile {self.tile} --min-points {self.min_points} --block {self.block}: "
                "each must be greater than 0"
            )
        if self.strip is not None and not 0 <= self.strip < float("inf"):
            raise ConfigError(f"--strip {self.strip}: must be a length of at least 0")

    @property
    def strip_width(self) -> float:
        return self.tile / 2 if self.strip is None else self.strip


def note_overlapping(places: list[Place]) -> None:
    """Print a note if separate surveys overlap, which then may share ground."""
    import numpy as np

    extents = [place.extent(-1) for place in places]
    low, high = (np.array([extent[end][:2] for extent in extents]) for end in (0, 1))
    for number, place in enumerate(places):
        overlap = (low[number] < high[:number]).all(axis=1) & (low[:number] < high[number]).all(
            axis=1
        )
        if overlap.any():
            note(
                f"{places[int(np.argmax(overlap))].stem} and {place.stem} overlap: if their "
                "coordinate system is the same, leave out --separate, or validation pairs of one "
                "file show ground that training pairs of another show"
            )
            return
