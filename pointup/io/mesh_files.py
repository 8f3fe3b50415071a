"""Reads the triangles of OFF, OBJ, STL and PLY files, and refuses files that end too early.

trimesh accepts truncated OFF files, takes a comment behind the counts of an OFF file for a part of
the mesh, counts negative indices of OBJ files from the end of the file instead of the line, refuses
comments behind numbers, and can't read OFF and binary PLY files with polygons of several sizes.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from pointup.disk import library_errors
from pointup.errors import DataError, FileError
from pointup.geometry.surfaces import Surface

FACE_PROPERTIES = ("vertex_indices", "vertex_index")


def read_triangles(path: Path) -> Surface:
    """The triangles of an existing mesh file, each once; convex polygons become fans of triangles.

    Raises FileError for a file that is damaged or without faces.
    """
    readers = {".off": _read_off, ".obj": _read_obj, ".ply": _read_ply}
    try:
        with library_errors(path, "not a readable mesh ({}); export it again"):
            vertices, faces = readers.get(path.suffix.lower(), _read_by_trimesh)(path)
            if not len(faces):
                if path.suffix.lower() == ".stl":
                    raise DataError("it has no faces; copy or export it again")
                raise DataError(
                    "it has points and no faces; mesh them first, or use them as points"
                )
            return _without_repeated_faces(Surface.from_triangles(vertices, faces))
    except DataError as error:
        raise FileError(f"{path}: {error}") from None


def _without_repeated_faces(surface: Surface) -> Surface:
    """The surface with each triangle once: a repeated one would get twice the points of others."""
    _, place = np.unique(surface.vertices, axis=0, return_inverse=True)
    corners = np.sort(place.reshape(-1)[surface.faces], axis=1)
    _, first = np.unique(corners, axis=0, return_index=True)
    return Surface(surface.vertices, surface.faces[np.sort(first)])


Triangles = tuple[np.ndarray, np.ndarray]


def _read_by_trimesh(path: Path, content: bytes | None = None) -> Triangles:
    import trimesh

    stream = io.BytesIO(path.read_bytes() if content is None else content)
    mesh = trimesh.load_mesh(stream, file_type=path.suffix[1:].lower(), process=False)
    return np.asarray(getattr(mesh, "vertices", ())), np.asarray(getattr(mesh, "faces", ()))


def _read_off(path: Path) -> Triangles:
    content = path.read_bytes()
    lines = [line.partition(b"#")[0].split() for line in content.splitlines()]
    words = [line for line in lines if line]
    # The counts follow OFF, COFF, ... on the same line or on the next, some without a blank.
    header = re.match(rb"[A-Z]*OFF", words[0][0]) if words else None
    if header is None:
        raise DataError("not an OFF file: it doesn't begin with OFF; export it again")
    counts = [words[0][0][header.end() :], *words[0][1:]]
    rest = words[1:]
    if not any(counts):
        counts, rest = (rest[0] if rest else []), rest[1:]
    num_vertices, num_faces = (int(count) for count in [c for c in counts if c][:2])
    faces = rest[num_vertices : num_vertices + num_faces]
    whole = sum(len(face) > int(face[0]) for face in faces)
    if whole < num_faces:
        raise DataError(f"ends after {whole:,} of {num_faces:,} faces; copy it again")
    short = next((v for v in rest[:num_vertices] if len(v) < 3), None)
    if short is not None:
        line = b" ".join(short).decode("latin-1")
        raise DataError(f"a vertex has fewer than three coordinates ({line}); export it again")
    vertices = np.array([vertex[:3] for vertex in rest[:num_vertices]], dtype=np.float64)
    return vertices.reshape(-1, 3), _fans_of_words(faces)


def _fans_of_words(faces: Sequence[Sequence[bytes]]) -> np.ndarray:
    """Triangles (T, 3) of the faces of an OFF file, which begin with their number of corners.

    They are grouped by this number and begin at the corners that trimesh chooses for quadrangles,
    because random samples of a surface depend on both.
    """
    groups: dict[int, list[Sequence[bytes]]] = {}
    for face in faces:
        groups.setdefault(int(face[0]), []).append(face)
    triangles = [np.empty((0, 3), np.int64)]
    for size in sorted(size for size in groups if size >= 3):
        corners = np.array([face[1 : size + 1] for face in groups[size]], dtype=np.int64)
        triangles.append(corners[:, :3])
        triangles += [corners[:, [k, k + 1, 0]] for k in range(2, size - 1)]
    return np.concatenate(triangles)


def _read_obj(path: Path) -> Triangles:
    content = path.read_bytes()
    if re.search(rb"(?m)^\s*(v\s.*#|f\s.*[-#])|^([ \t]+[vf]|[vf]\t)", content):
        lines = content.replace(b"\\\n", b" ").splitlines()
        content = b"\n".join(_with_absolute_indices(lines))
    return _read_by_trimesh(path, content)


def _with_absolute_indices(lines: Iterable[bytes]) -> Iterable[bytes]:
    """The vertices and faces of an OBJ file: -1 in a face is the vertex above it in the file."""
    num_vertices = 0
    for line in lines:
        words = line.partition(b"#")[0].split()
        if words[:1] == [b"v"]:
            num_vertices += 1
            yield b" ".join(words)
        elif words[:1] == [b"f"]:
            corners = [int(word.partition(b"/")[0]) for word in words[1:]]
            corners = [c + num_vertices + 1 if c < 0 else c for c in corners]
            if min(corners, default=1) < 1:
                raise DataError(f"a face has a vertex before the first ({line.decode('latin-1')})")
            yield b"f " + b" ".join(b"%d" % corner for corner in corners)


def _check_counts(path: Path) -> None:
    """Raise DataError if the header of a PLY file counts more than its bytes can hold, because
    plyfile allocates memory by these counts."""
    with path.open("rb") as stream:
        header = stream.read(1 << 16).partition(b"end_header")[0]
    for name, count in re.findall(rb"(?m)^element[ \t]+(\S+)[ \t]+(\d+)", header):
        if len(count) > 18 or int(count) > path.stat().st_size:
            number, kind = count[:40].decode(), name[:40].decode("latin-1")
            raise DataError(f"ends before the {number} of {kind} in its header; copy it again")


def _read_ply(path: Path) -> Triangles:
    import plyfile

    _check_counts(path)
    triangles = {"face": dict.fromkeys(FACE_PROPERTIES, 3)}
    try:
        try:
            data = plyfile.PlyData.read(str(path), known_list_len=triangles)
        except (plyfile.PlyElementParseError, ValueError):
            data = plyfile.PlyData.read(str(path), mmap=False)
    except plyfile.PlyElementParseError as error:
        raise DataError(f"{error}; copy it again") from None
    vertices = np.column_stack([data["vertex"][axis] for axis in "xyz"]).astype(np.float64)
    if "face" not in data:
        return vertices, np.empty((0, 3), np.int64)
    names = [name for name in FACE_PROPERTIES if name in data["face"].data.dtype.names]
    if not names:
        raise DataError("its faces have no vertex_indices; export it again")
    return vertices, _fans(data["face"][names[0]])


def _fans(polygons: Sequence[np.ndarray] | np.ndarray) -> np.ndarray:
    """Triangles (T, 3) of polygons, each from its first corner."""
    if isinstance(polygons, np.ndarray) and polygons.ndim == 2 and polygons.shape[1] == 3:
        return polygons.astype(np.int64)
    fans = [(p[0], b, c) for p in polygons for b, c in pairwise(p[1:])]
    return np.array(fans, dtype=np.int64).reshape(-1, 3)
