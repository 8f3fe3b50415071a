"""Virtual point clouds (`.vpc`): files of one survey, listed as QGIS and pdal_wrench do."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
from laspy import LasHeader

from pointup.disk import os_errors, write_text
from pointup.errors import FileError
from pointup.io.las import read_header
from pointup.io.length_unit import named_system

EXTENSION = ".vpc"
_STAC = "https://stac-extensions.github.io"
_PDAL_NAMES = {"scan_angle": "ScanAngleRank", "scanner_channel": "ScanChannel", "nir": "Infrared"}
_PDAL_TYPES = {"f": "floating", "i": "signed", "u": "unsigned"}


def files_of(path: Path) -> list[Path]:
    """The files that a virtual point cloud lists, in its order, without overviews; for any other
    path, itself. Relative names start at the folder of the list.

    Raises FileError for a list that can't be read, lists nothing, or names files that are missing
    or are not on this machine.
    """
    if path.suffix.lower() != EXTENSION:
        return [path]
    try:
        with os_errors(path, "read"):
            items = json.loads(path.read_text(encoding="utf-8-sig"))["features"]
        names = [_data_of(item["assets"]) for item in items]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise FileError(
            f"{path}: isn't a virtual point cloud (a STAC item collection); build it again"
        ) from None
    if not names:
        raise FileError(f"{path}: lists no files; build it again")
    local = {name: _local(name) for name in names}
    if remote := [name for name, file in local.items() if file is None]:
        raise FileError(
            f"{path}: {len(remote)} of its {len(names)} files are on a server, such as "
            f"{remote[0]}; download them, and build the virtual point cloud of the copies"
        )
    files = [path.parent / file for file in local.values() if file is not None]
    if missing := [file for file in files if not file.exists()]:
        raise FileError(
            f"{path}: {len(missing)} of its {len(files)} files are missing, such as {missing[0]}; "
            "copy them there, or build it again"
        )
    return [Path(os.path.normpath(file)) for file in files]


def _data_of(assets: dict[str, Any]) -> str:
    """The name of the point file among the assets of an item."""
    is_overview = {name: "overview" in asset.get("roles", ()) for name, asset in assets.items()}
    return str(assets[min(assets, key=lambda name: (is_overview[name], name != "data"))]["href"])


def _local(name: str) -> str | None:
    """The path of a name; None for an address on a server."""
    parts = urlsplit(name)
    if parts.scheme == "file":
        return unquote(parts.path)
    # One letter is a drive of Windows. pdal_wrench writes backslashes there.
    return name.replace("\\", "/") if len(parts.scheme) < 2 else None


def write_virtual_cloud(path: Path, files: Sequence[Path]) -> int:
    """List LAS and LAZ files in a virtual point cloud, with what their headers say of each.

    Returns their number, without those that have no points. Statistics are left out: readers want
    means, for which all points would have to be read.
    Raises FileError if a header can't be read or the list can't be written.
    """
    headers = {file: read_header(file) for file in files}
    items = [
        _item(file, os.path.relpath(file, path.parent), header)
        for file, header in headers.items()
        # A tile without returns has no extent.
        if header.point_count
    ]
    write_text(path, json.dumps({"type": "FeatureCollection", "features": items}) + "\n")
    return len(items)


def _item(file: Path, name: str, header: LasHeader) -> dict[str, Any]:
    from pyproj import Transformer
    from pyproj.exceptions import ProjError

    system = named_system(file)
    corners = np.array([header.mins, header.maxs])
    degrees = corners
    with suppress(ProjError):
        # GeoJSON is in longitudes and latitudes; readers prefer those of the system of the file.
        to_degrees = Transformer.from_crs(system or 4326, 4326, always_xy=True)
        # PROJ calls single points of some areas outside, whose bounds it finds nevertheless.
        sides = to_degrees.transform_bounds(*corners[:, :2].ravel().tolist())
        if np.isfinite(sides).all():
            degrees = np.column_stack([np.reshape(sides, (2, 2)), corners[:, 2]])
    schemas = [{"name": axis, "size": 8, "type": "floating"} for axis in "XYZ"]
    for dimension in list(header.point_format.dimensions)[3:]:
        known = dimension.is_standard and _PDAL_NAMES.get(
            dimension.name, dimension.name.title().replace("_", "")
        )
        kind = _PDAL_TYPES[np.dtype(dimension.dtype or "u1").base.kind]
        size = max(1, dimension.num_bits // 8)
        schemas.append({"name": known or dimension.name, "size": size, "type": kind})
    # Not set in many files; pdal_wrench takes this day, too.
    day = header.creation_date or date(1970, 1, 1)
    return {
        "type": "Feature",
        "stac_version": "1.0.0",
        "stac_extensions": [
            f"{_STAC}/pointcloud/v1.0.0/schema.json",
            f"{_STAC}/projection/v1.1.0/schema.json",
        ],
        "id": Path(name).with_suffix("").as_posix(),
        "geometry": _rectangle(degrees),
        "bbox": degrees.ravel().tolist(),
        "properties": {
            "datetime": f"{day.isoformat()}T00:00:00Z",
            "pc:count": header.point_count,
            "pc:type": "lidar",
            "pc:encoding": file.suffix.lower()[1:],
            "pc:schemas": schemas,
            "proj:wkt2": "" if system is None else system.to_wkt(),
            "proj:bbox": corners.ravel().tolist(),
            "proj:geometry": _rectangle(corners),
        },
        "links": [],
        "assets": {"data": {"href": f"./{Path(name).as_posix()}", "roles": ["data"]}},
    }


def _rectangle(corners: np.ndarray) -> dict[str, Any]:
    (left, bottom, low), (right, top, high) = corners.tolist()
    ring = [[left, bottom, low], [right, bottom, low], [right, top, high], [left, top, high]]
    return {"type": "Polygon", "coordinates": [[*ring, ring[0]]]}
