"""Compares the horizontal coordinate systems that the headers of LAS and LAZ files name."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pointup.errors import FileError
from pointup.io.files import LAS_EXTENSIONS
from pointup.io.length_unit import own_projection

if TYPE_CHECKING:
    from pyproj import CRS


def different_systems(paths: Sequence[Path]) -> dict[Path, str]:
    """The first file in each horizontal system among these files, with the name of the system.

    Systems are the same if their datum, projection and unit are, however a header writes them;
    heights and the order of axes do not count. A file counts only if it is LAS or LAZ, its header
    can be read, and its system is known and no local one. Projections that GeoTIFF keys describe
    without a code are not known.
    """
    found: dict[Path, CRS] = {}
    names: dict[Path, str] = {}
    texts = set()
    for path in paths:
        system = _system_of(path)
        # The tiles of a survey repeat one text, and texts are fast to compare.
        if system is None or system.srs in texts:
            continue
        texts.add(system.srs)
        horizontal = _horizontal(system)
        if horizontal is None or any(
            horizontal.equals(other, ignore_axis_order=True) for other in found.values()
        ):
            continue
        is_known = horizontal.name in names.values()
        names[path] = horizontal.name + (" with other parameters" if is_known else "")
        found[path] = horizontal
    return names


def _system_of(path: Path) -> CRS | None:
    if path.suffix.lower() not in LAS_EXTENSIONS:
        return None
    from pyproj.exceptions import ProjError

    from pointup.io.las import read_header

    with suppress(ProjError, FileError):
        header = read_header(path)
        return header.parse_crs() if own_projection(header) is None else None
    return None


def _horizontal(system: CRS) -> CRS | None:
    """The system without heights and transformations; a projected one with axes east and north.

    Points are stored with x to the east also where EPSG puts the north first, and some writers
    leave the axes out. None for a local system.
    """
    from pyproj import CRS

    while system.is_bound or system.is_compound:
        part = system.sub_crs_list[0] if system.sub_crs_list else system.source_crs
        if part is None:
            return None
        system = part
    if not system.is_projected:
        return system.to_2d() if system.is_geographic or system.is_geocentric else None
    content = system.to_2d().to_json_dict()
    axes = content["coordinate_system"]["axis"]
    for axis, (name, sign) in zip(axes, (("Easting", "E"), ("Northing", "N")), strict=True):
        axis |= {"name": name, "abbreviation": sign, "direction": name.lower()[:-3]}
    datum = content["base_crs"].get("datum", {})
    # "Unknown based on GRS80 ellipsoid": an unknown datum equals any one on its ellipsoid.
    if datum.get("name", "").lower().startswith("unknown"):
        datum["name"] = "unknown"
    return CRS.from_json_dict(content)
