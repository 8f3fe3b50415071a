"""The unit of length and the coordinate system of files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pointup.errors import DataError, FileError
from pointup.io.cloud import LAS_EXTENSIONS

if TYPE_CHECKING:
    from laspy import LasHeader
    from pyproj import CRS


_MODEL_TYPE, _PROJECTION, _VERTICAL, _USER_DEFINED = 1024, 3072, 4096, 32767
_GEOGRAPHIC, _GEOCENTRIC = 2, 3  # values of _MODEL_TYPE
_UNIT_KEYS = (3076, 4099)  # of x and y, of heights
_LENGTHS = {9001: 1.0, 9002: 0.3048, 9003: 1200 / 3937}
_NAMES = {0.3048: "ft", 1200 / 3937: "US ft", 1.0: "m"}


@dataclass(frozen=True)
class LengthUnit:
    """The name of a unit of length, and its length in metres; None if that is unknown."""

    name: str
    metres: float | None

    def of_metres(self, length: float) -> float:
        """Convert a length from metres to this unit; an unknown unit counts as a metre."""
        return length / (self.metres or 1.0)

    def described(self, length: float) -> str:
        """Format a length in metres, followed by its value in this unit: "0.5 m (1.64 ft)"."""
        if self.metres is None:
            return f"{length:g} {self.name}"
        converted = f" ({self.of_metres(length):.3g} {self.name})" if self.metres != 1 else ""
        return f"{length:g} m{converted}"


METRE = LengthUnit("m", 1.0)
UNKNOWN = LengthUnit("unit", None)
ANGLES = LengthUnit("degrees or grads", None)
LIKELY_ANGLES = LengthUnit("degrees, by their range and the heights", None)
MIXED = LengthUnit("mixed units", None)
# A survey in degrees is a thousand times higher than wide, and a pole in metres some tens of times.
_HIGHER_THAN_WIDE = 200
# Their lengths are true at the equator only.
_MERCATOR = ("Popular Visualisation Pseudo Mercator", "Mercator (variant A)")


def unit_of(metres: float) -> LengthUnit:
    """The unit with this length in metres; metres and both feet get their usual names."""
    for length, name in _NAMES.items():
        # The international foot and the US survey foot differ by two parts in a million.
        if abs(metres - length) < 1e-7 * length:
            return LengthUnit(name, length)
    return LengthUnit(f"unit of {metres:g} m", metres)


def length_unit(path: str | Path, with_heights: bool = True) -> LengthUnit:
    """The unit of a LAS or LAZ file, from its coordinate system; `with_heights` or of x and y only.

    `UNKNOWN` for other formats, without a coordinate system, or with one that can't be parsed.
    `ANGLES` for longitudes and latitudes, `LIKELY_ANGLES` where only the extents say so, `MIXED` if
    heights have another unit than x and y.
    Raises FileError for a file whose header can't be read.
    """
    header = _header_of(Path(path))
    if header is None:
        return UNKNOWN
    if _model_type(header) == _GEOGRAPHIC:
        return ANGLES
    own = own_projection(header)
    if own is not None:
        return own
    system = _system_of(header)
    if system is None or not system.axis_info:
        return LIKELY_ANGLES if _look_like_degrees(header) else UNKNOWN
    if system.is_geographic:
        return ANGLES
    factors = [axis.unit_conversion_factor for axis in system.axis_info]
    factors = _with_geo_keys(factors, header)
    return _unit_of_axes(factors if with_heights else factors[:1])


def _unit_of_axes(factors: Sequence[float]) -> LengthUnit:
    """The unit of x and y from the lengths of the units of axes, x first; MIXED if they differ.

    Heights are often in the other foot, two millionths longer or shorter, which is no difference.
    """
    same = all(math.isclose(factors[0], other, rel_tol=1e-5) for other in factors)
    return unit_of(factors[0]) if same else MIXED


def _look_like_degrees(header: LasHeader) -> bool:
    """Whether coordinates without a system are longitudes, latitudes and heights in metres: within
    their range, and the survey much higher than wide, because a metre is 1e-5 degrees."""
    in_range = all(
        abs(corner[0]) <= 360 and abs(corner[1]) <= 90 for corner in (header.mins, header.maxs)
    )
    x, y, z = header.maxs - header.mins
    return bool(in_range and 0 < max(x, y) < z / _HIGHER_THAN_WIDE)


def mercator_stretch(path: Path) -> float | None:
    """Length on the map of a unit on the ground, in the middle of a LAS file in a Mercator system.

    None for any other file, also for one whose header can't be read.
    """
    from pyproj import Transformer
    from pyproj.exceptions import ProjError

    with suppress(ProjError, FileError):
        header = _header_of(path)
        system = header and _system_of(header)
        # The horizontal part of a system with heights.
        system = system.sub_crs_list[0] if system and system.sub_crs_list else system
        operation = system and system.coordinate_operation
        if header and system and operation and operation.method_name in _MERCATOR:
            to_degrees = Transformer.from_crs(system, system.geodetic_crs, always_xy=True)
            middle = (header.mins[:2] + header.maxs[:2]) / 2
            latitude = to_degrees.transform(*middle)[1]
            # A damaged header may have no middle.
            return 1 / math.cos(math.radians(latitude)) if math.isfinite(latitude) else None
    return None


def names_geocentric(path: Path) -> bool:
    """Whether the coordinate system of a LAS file has axes through the Earth: z is no height then.

    False for any other file, also for one whose header can't be read.
    """
    with suppress(FileError):
        if header := _header_of(path):
            system = _system_of(header)
            return _model_type(header) == _GEOCENTRIC or bool(system and system.is_geocentric)
    return False


def _header_of(path: Path) -> LasHeader | None:
    """The header of a LAS or LAZ file; None for other formats. FileError if it can't be read."""
    if path.suffix.lower() not in LAS_EXTENSIONS:
        return None
    from pointup.io.las import read_header

    return read_header(path)


def _system_of(header: LasHeader) -> CRS | None:
    """The coordinate system of a header; None without one, and for one that can't be parsed."""
    from pyproj.exceptions import ProjError

    with suppress(ProjError):
        system = header.parse_crs()
        # The keys of geocentric coordinates may name the geographic system below them.
        is_base = system and system.is_geographic and _model_type(header) == _GEOCENTRIC
        return None if is_base else system
    return None


def named_system(path: Path) -> CRS | None:
    """The coordinate system that a LAS or LAZ file names.

    None for other formats, for a header that can't be read, without a system or with one that can't
    be parsed, and for a projection that GeoTIFF keys describe without a code.
    """
    with suppress(FileError):
        header = _header_of(path)
        if header and own_projection(header) is None:
            return _system_of(header)
    return None


def _with_geo_keys(factors: list[float], header: LasHeader) -> list[float]:
    """The lengths of the units of the axes, with those that GeoTIFF keys name beside a code.

    laspy reads only the code of the horizontal system.
    """
    from pyproj import CRS
    from pyproj.exceptions import CRSError

    keys = _geo_keys(header)
    horizontal, vertical = (_LENGTHS.get(keys.get(key, 0)) for key in _UNIT_KEYS)
    if horizontal is not None:
        factors = [horizontal]
    if vertical is not None:
        return [*factors, vertical]
    with suppress(CRSError):
        system = CRS.from_epsg(keys[_VERTICAL]) if _VERTICAL in keys else None
        if system and system.is_vertical:
            return [*factors, *(axis.unit_conversion_factor for axis in system.axis_info)]
    return factors


def _geo_keys(header: LasHeader) -> dict[int, int]:
    """The GeoTIFF keys of a header; none if there is a WKT."""
    records = [*header.vlrs, *(header.evlrs or [])]
    if any(type(record).__name__ == "WktCoordinateSystemVlr" for record in records):
        return {}
    directory = header.vlrs.get("GeoKeyDirectoryVlr")
    return {key.id: key.value_offset for key in directory[0].geo_keys} if directory else {}


def _model_type(header: LasHeader) -> int | None:
    """What GeoTIFF keys say that coordinates are, also where they have no code of a system.

    None if they say nothing, or name a projection or its unit, which may contradict it.
    """
    keys = _geo_keys(header)
    has_projection = keys.get(_PROJECTION, 0) not in (0, _USER_DEFINED)
    return None if has_projection or _UNIT_KEYS[0] in keys else keys.get(_MODEL_TYPE)


def own_projection(header: LasHeader) -> LengthUnit | None:
    """The unit of a header whose GeoTIFF keys describe a user-defined projection, without a code.

    None for any other header. laspy takes its geographic base system for the system of these files.
    """
    keys = _geo_keys(header)
    if keys.get(_PROJECTION) != _USER_DEFINED:
        return None
    lengths = [_LENGTHS.get(keys[key]) for key in _UNIT_KEYS if key in keys]
    known = [length for length in lengths if length is not None]
    return _unit_of_axes(known) if known and known == lengths else UNKNOWN


def units_of_readable(paths: Sequence[Path]) -> dict[Path, LengthUnit]:
    """The unit of each file whose header can be read; others are reported when they are read."""
    units = {}
    for path in paths:
        with suppress(FileError):
            units[path] = length_unit(path)
    return units


def common_unit(paths: Sequence[Path]) -> LengthUnit:
    """`agreed_unit` of files. Raises its errors and those of `length_unit`."""
    return agreed_unit({path: length_unit(path) for path in paths})


def agreed_unit(units: Mapping[Path, LengthUnit]) -> LengthUnit:
    """The common unit of all files; a file of unknown unit is assumed to have that of the others.

    Raises DataError that names the files if units differ, or if a unit is not a length.
    """
    common, first = UNKNOWN, Path()
    for path, unit in units.items():
        if unit in (ANGLES, LIKELY_ANGLES, MIXED):
            insist = " (pointup upsample takes it with --force)" if unit == LIKELY_ANGLES else ""
            raise DataError(
                f"{path}: its coordinates are in {unit.name}; distances need one unit of length, "
                f"reproject it{insist}"
            )
        if unit == UNKNOWN:
            continue
        if common not in (UNKNOWN, unit):
            raise DataError(
                f"{path}: is in {unit.name}, {first} in {common.name}; reproject one of them"
            )
        common, first = unit, path
    return common


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
        system = named_system(path)
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
