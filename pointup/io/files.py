"""Reads and writes point and mesh files of all formats; the file extension selects the format."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from pointup.disk import file_state, os_errors, resolve_symlink, written_whole
from pointup.errors import ConfigError, FileError
from pointup.geometry.surfaces import Surface
from pointup.io.bounds import Bounds
from pointup.io.cloud import (
    LAS_EXTENSIONS,
    ExtraDimension,
    PointCloud,
    PointWriter,
    as_float64,
    check_attributes,
    check_magnitudes,
    warn_once,
    with_coordinates,
)
from pointup.io.e57 import E57Writer, check_pye57, read_e57
from pointup.io.mesh_files import read_triangles
from pointup.io.numpy_files import NpyWriter, NpzWriter, read_npy, read_npz
from pointup.io.pcd import PcdWriter, read_pcd
from pointup.io.ply import PlyWriter, read_ply
from pointup.io.pts import PtsWriter, SweepWriter, read_pts, read_sweep
from pointup.io.text_tables import COLUMNS_OF, TextWriter, read_text

__all__ = [
    "ExtraDimension",
    "PointCloud",
    "PointWriter",
    "check_readable",
    "check_writable",
    "copy_file",
    "copy_points",
    "iter_points",
    "mesh_extensions",
    "open_writer",
    "point_extensions",
    "read_mesh",
    "read_points",
    "write_points",
]

TEXT_EXTENSIONS = (".xyz", ".txt", ".csv", ".asc", *COLUMNS_OF)
FORMATS: dict[str, tuple[Callable[[Path], PointCloud], type[PointWriter]]] = {
    ".ply": (read_ply, PlyWriter),
    ".pcd": (read_pcd, PcdWriter),
    ".e57": (read_e57, E57Writer),
    ".pts": (read_pts, PtsWriter),
    ".bin": (read_sweep, SweepWriter),
    **dict.fromkeys(TEXT_EXTENSIONS, (read_text, TextWriter)),
    ".npy": (read_npy, NpyWriter),
    ".npz": (read_npz, NpzWriter),
}
writable_extensions = (*LAS_EXTENSIONS, *(name for name in FORMATS if name not in COLUMNS_OF))
point_extensions = (*LAS_EXTENSIONS, *FORMATS, ".obj")
mesh_extensions = (".off", ".obj", ".stl", ".ply")
SCANNER_EXTENSIONS = (*LAS_EXTENSIONS, ".e57", ".pts", ".pcd", ".bin")
"""Of files that laser scanners on the ground, on cars and in the air are read out to."""
# Formats that hold meshes only. Some of them can't be read.
MESH_ONLY_EXTENSIONS = (
    ".off", ".stl", ".gltf", ".glb", ".dae", ".3ds", ".fbx", ".3mf", ".usd", ".usdz",
)  # fmt: skip


def read_points(path: str | Path, attributes: bool = True) -> PointCloud:
    """Read all points of a file.

    `attributes=False` reads only the coordinates, which saves time and memory for LAS and LAZ. The
    formats are LAS, LAZ, COPC (as LAZ), PLY and OBJ (vertices), PCD, E57 (with pye57), PTS, KITTI
    BIN, XYZ, XYZN, XYZRGB, TXT, CSV, ASC, NPY and NPZ. Raises FileError for a file that is missing,
    damaged, of an unknown format or without points. Points of other formats than LAS whose
    coordinates are not finite are left out, with a note.
    """
    path = check_readable(path)
    suffix = path.suffix.lower()
    if suffix in LAS_EXTENSIONS:
        from pointup.io.las import read_las

        return read_las(path, attributes)
    read = FORMATS[suffix][0] if suffix in FORMATS else _read_obj_vertices
    cloud = with_coordinates(read(path))
    if not attributes:
        cloud.attributes = {}
    return cloud


def iter_points(
    path: str | Path,
    chunk_size: int = 1_000_000,
    attributes: bool = True,
    bounds: Bounds | None = None,
) -> Iterator[PointCloud]:
    """Yield the points of a file, or those in `bounds`, in order, in chunks of `chunk_size`.

    LAS, LAZ and COPC are streamed. Of a COPC file only what the bounds touch is read. Other formats
    are read completely and then split. Raises the errors of `read_points` and `check_magnitudes`;
    damage in a later chunk is reported when that chunk is read.
    """
    if chunk_size < 1:
        raise ConfigError(f"chunk_size {chunk_size}: must be at least 1")
    path = check_readable(path)
    for chunk in _chunks_of(path, chunk_size, attributes, bounds):
        check_magnitudes(chunk.positions, f"{path}: points")
        yield chunk


def _chunks_of(
    path: Path, chunk_size: int, attributes: bool, bounds: Bounds | None
) -> Iterator[PointCloud]:
    if path.suffix.lower() in LAS_EXTENSIONS:
        from pointup.io.las import iter_las

        yield from iter_las(path, chunk_size, attributes, bounds)
        return
    cloud = read_points(path, attributes)
    if bounds is not None:
        cloud = cloud.select(bounds.inside(cloud.positions))
    for start in range(0, len(cloud), chunk_size):
        yield cloud.select(slice(start, start + chunk_size))


def read_first(path: str | Path, number: int) -> PointCloud:
    """The first points of a file, at most `number`; raises the errors of `read_points`.

    Of LAS and LAZ no more than these are read, so that damage after them is not found.
    """
    path = check_readable(path)
    if path.suffix.lower() in LAS_EXTENSIONS:
        from pointup.io.las import first_of_las

        return first_of_las(path, number)
    return read_points(path).select(slice(number))


def read_extremes(path: str | Path) -> PointCloud:
    """Two points with the header of a file, and its extreme coordinates and values in each column.

    Of LAS and LAZ, the first points. Raises the errors of `read_points`.
    """
    if Path(path).suffix.lower() in LAS_EXTENSIONS:
        return read_first(path, 2)
    from pointup.io.las_writer import extremes

    cloud = read_points(path)
    few = cloud.select(slice(2))
    few.attributes |= extremes(cloud.attributes)
    few.positions = np.stack([cloud.positions.min(axis=0), cloud.positions.max(axis=0)])
    return few


def open_writer(
    path: str | Path, like: PointCloud, extra_dimensions: Sequence[ExtraDimension] = ()
) -> PointWriter:
    """Open a `PointWriter` for a file with the layout of the file that `like` was read from.

    `like` may be any part of that file: only its header and its attribute names and types are used.
    If a file of another format is written as LAS, `like` must have its extent and the ranges of its
    attributes, see `read_extremes`. The extension of `path` selects
    the format. `extra_dimensions` are added to the attributes of `like`. Use the writer in a `with`
    block. Raises the errors of `check_writable`.
    """
    path = Path(path)
    check_writable(path)
    suffix = path.suffix.lower()
    if suffix in LAS_EXTENSIONS:
        from pointup.io.las_writer import LasWriter

        return LasWriter(path, like, extra_dimensions)
    return FORMATS[suffix][1](path, like, extra_dimensions)


def write_points(path: str | Path, cloud: PointCloud | np.ndarray) -> None:
    """Write a cloud or an array (N, 3) atomically; replaces an existing file. See `open_writer`."""
    cloud = cloud if isinstance(cloud, PointCloud) else PointCloud(cloud)
    # In the type of the points, such as float16, a writer's offsets and scales would overflow.
    cloud = replace(cloud, positions=as_float64(cloud.positions))
    stores_words = Path(path).suffix.lower() not in (*LAS_EXTENSIONS, ".ply", ".pcd", ".npy")
    check_attributes(cloud, str(path), "OMmcV" if stores_words else "OMmcVSU")
    with open_writer(path, cloud) as writer:
        writer.write(cloud)


def copy_points(
    path: str | Path,
    writer: PointWriter,
    chunk_size: int = 1_000_000,
    bounds: Bounds | None = None,
) -> None:
    """Append all points of a file, or those in `bounds`, to an open writer, unchanged, in order.

    From LAS to LAS the raw records are copied bit for bit. Added dimensions get their defaults.
    """
    path = check_readable(path)
    if path.suffix.lower() in LAS_EXTENSIONS and writer.path.suffix.lower() in LAS_EXTENSIONS:
        from pointup.io.las_writer import copy_las

        copy_las(path, writer, chunk_size, bounds)
        return
    for cloud in _chunks_of(path, chunk_size, attributes=True, bounds=bounds):
        writer.write(cloud)


def copy_file(path: Path, target: Path) -> None:
    """Copy a file byte by byte, all or nothing, into a folder that is made where it is missing.

    Raises FileError when the file can't be read or the target can't be written.
    """
    with os_errors(path, "read"):
        state = file_state(path)
    with os_errors(target, "written"):
        target.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(target) as part:
            # By the system: a survey may be larger than memory.
            shutil.copyfile(path, part)
            if (file_state(path), part.stat().st_size) != (state, state[1]):
                raise FileError(f"{path}: changed while it was copied; repeat it")


def read_mesh(path: str | Path) -> Surface:
    """Read the triangles of an OFF, OBJ, STL or PLY file; convex polygons are triangulated.

    Raises FileError for a file that is missing, damaged, of an unknown format or without faces.
    """
    return read_triangles(_existing_file(path, mesh_extensions))


def _read_obj_vertices(path: Path) -> PointCloud:
    rows, num_faces, has_colours = [], 0, False
    with os_errors(path, "read"), path.open("rb") as stream:
        for line in stream:
            line = line.lstrip()
            if line.startswith((b"v ", b"v\t")):
                words = line.partition(b"#")[0].split()
                rows.append(words[1:4])
                has_colours |= len(words) == 7
            num_faces += line.startswith((b"f ", b"f\t"))
    if num_faces:
        warn_once(
            f"{path}: its {num_faces:,} faces are dropped; to sample the surface of a mesh, see "
            "`pointup prepare meshes`"
        )
    if has_colours:
        warn_once(f"{path}: the colours of its vertices are dropped; save it as PLY to keep them")
    try:
        positions = np.array(rows, dtype=np.float64).reshape(len(rows), 3)
    except ValueError:
        raise FileError(f"{path}: has a vertex that isn't three numbers; export it again") from None
    return PointCloud(positions, path=path)


def check_readable(path: str | Path) -> Path:
    """The path of an existing point file; FileError for any other path."""
    path = Path(path)
    if path.suffix.lower() in MESH_ONLY_EXTENSIONS:
        raise FileError(
            f"{path}: is a mesh, and points are needed: sample its surface (CloudCompare, trimesh) "
            "and save those; for training pairs, `pointup prepare meshes` samples it"
        )
    return _existing_file(path, point_extensions)


def check_writable(path: str | Path) -> None:
    """Raise FileError for a path that no point file can be written to. Call it before any work."""
    path = Path(path)
    if path.suffix.lower() not in writable_extensions:
        raise _unknown_format(path, writable_extensions, " to write")
    # A plain LAZ file must not have the name of a COPC file. copclib is the only Python library
    # that writes COPC; it can't name extra dimensions and drops all other records.
    if any(name.lower().endswith(".copc.laz") for name in (path.name, resolve_symlink(path).name)):
        raise FileError(
            f"{path}: COPC files can't be written; name it .laz, and convert that, for example "
            "with `pdal translate a.laz a.copc.laz --writers.copc.forward=all "
            "--readers.las.use_eb_vlr=true`"
        )
    if path.suffix.lower() == ".e57":
        check_pye57(path)


def _existing_file(path: str | Path, extensions: Sequence[str]) -> Path:
    path = Path(path)
    if path.is_dir():
        raise FileError(f"{path}: is a folder; name the files in it")
    if not path.exists():
        raise FileError(f"{path}: no such file")
    if path.suffix.lower() not in extensions:
        raise _unknown_format(path, extensions)
    if not path.is_file():
        raise FileError(f"{path}: is a device or a pipe; name a file")
    if not path.stat().st_size:
        raise FileError(f"{path}: is empty (0 bytes); copy or export it again")
    return path


def _unknown_format(path: Path, extensions: Sequence[str], verb: str = "") -> FileError:
    kind = f"extension {path.suffix!r}" if path.suffix else "file without an extension"
    return FileError(f"{path}: unknown {kind}{verb}; known are {' '.join(extensions)}")
