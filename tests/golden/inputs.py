"""Small surveys, shapes, meshes and patches with fixed seeds, written without pointup."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import h5py
import laspy
import numpy as np
from copc_files import write_copc
from laspy.vlrs.vlr import VLR

CORNER = np.array([500_000.0, 4_100_000.0, 100.0])
WKT = VLR("LASF_Projection", 2112, "WKT", b'LOCAL_CS["somewhere"]')
SPARSE_BYTES = 210_000_000
"""From 200 MB on, `pointup prepare` cuts a survey into regions."""


def terrain(number: int, seed: int, width: float = 30.0) -> tuple[np.ndarray, np.ndarray]:
    """Points of hilly ground with trees and a house, and their classes: 2, 5 and 6; 7 is noise."""
    rng = np.random.default_rng(seed)
    x, y = width * rng.random((2, number))
    z = np.sin(x / 4) + y / 20
    trees = width * np.random.default_rng(0).random((6, 2))
    away = np.linalg.norm(np.stack([x, y], 1)[:, None] - trees, axis=2).min(axis=1)
    is_tree, is_house = away < 2.5, (abs(x - width / 2) < 4) & (abs(y - width / 2) < 3)
    z += np.where(is_tree, 6 * rng.random(number), 0)
    z = np.where(is_house, 8 - abs(x - width / 2) / 2, z) + rng.normal(0, 0.02, number)
    classes = np.where(is_house, 6, np.where(is_tree, 5, 2))
    classes[: number // 100] = 7
    return (CORNER + np.stack([x, y, z], 1)).round(3), classes


def write_las(path: Path, points: np.ndarray, classes: np.ndarray | None = None) -> Path:
    """Write a survey in point format 7, with colours, a coordinate system and extra dimensions."""
    rng = np.random.default_rng(len(points))
    header = laspy.LasHeader(version="1.4", point_format=7)
    header.scales, header.offsets = np.full(3, 0.001), CORNER.round()
    header.creation_date = date(2020, 1, 2)
    header.add_extra_dim(laspy.ExtraBytesParams("height", "int16", scales=[0.1], offsets=[5.0]))
    header.add_extra_dim(laspy.ExtraBytesParams("score", "float32"))
    header.vlrs.append(WKT)
    las = laspy.LasData(header)
    las.xyz = points
    las.classification = np.full(len(points), 2) if classes is None else classes
    for name in ("intensity", "red", "green", "blue"):
        las[name] = rng.integers(0, 2**16, len(points))
    las.gps_time = np.sort(rng.random(len(points)))
    las.number_of_returns = rng.integers(1, 4, len(points))
    las.return_number = rng.integers(1, np.asarray(las.number_of_returns) + 1)
    las.height = rng.integers(0, 100, len(points)) / 10
    las.score = rng.random(len(points))
    path.parent.mkdir(parents=True, exist_ok=True)
    las.write(path)
    return path


def survey(folder: Path) -> Path:
    return write_las(folder / "survey.las", *terrain(1200, 1))


def copc(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "survey.copc.laz"
    write_copc(path, terrain(3000, 2)[0], node_points=200)
    return path


def tiles(folder: Path) -> Path:
    """Two files that border on each other."""
    points, classes = terrain(1600, 3)
    is_west = points[:, 0] < CORNER[0] + 15
    write_las(folder / "tiles" / "west.las", points[is_west], classes[is_west])
    write_las(folder / "tiles" / "east.laz", points[~is_west], classes[~is_west])
    return folder / "tiles"


def shape(folder: Path, noise: float = 0.0) -> Path:
    """A bent tube with a colour, as a binary PLY file."""
    rng = np.random.default_rng(4)
    u, v = 2 * np.pi * rng.random((2, 700))
    radius = 1 + (0.35 + 0.05 * np.cos(5 * u)) * np.cos(v)
    points = np.stack([radius * np.cos(u), radius * np.sin(u), 0.35 * np.sin(v)], axis=1)
    points += rng.normal(0, 1, points.shape) * noise
    rows = np.empty(700, [("x", "<f4"), ("y", "<f4"), ("z", "<f4"), ("red", "u1")])
    rows["x"], rows["y"], rows["z"] = points.T
    rows["red"] = rng.integers(0, 256, 700)
    head = "ply\nformat binary_little_endian 1.0\nelement vertex 700\n"
    head += "property float x\nproperty float y\nproperty float z\nproperty uchar red\nend_header\n"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "shape.ply"
    path.write_bytes(head.encode() + rows.tobytes())
    return path


def noisy_shape(folder: Path) -> Path:
    return shape(folder, noise=0.03)


def sparse_and_dense(folder: Path) -> Path:
    """Two surveys of the same area, independent of each other: sparse.las and dense.las."""
    write_las(folder / "sparse.las", *terrain(1500, 5, width=60))
    write_las(folder / "dense.las", *terrain(6000, 6, width=60))
    return folder


def large_survey(folder: Path) -> Path:
    """sparse/ and dense/ of five small files far from each other, by their size a large survey.

    With blocks of 2,000 units each region is a block, and each file lies in two or four of them.
    The hole behind the last point of a file takes no space on the disk.
    """
    for side, number in (("sparse", 300), ("dense", 1200)):
        for i in range(5):
            points, classes = terrain(number, 10 + i)
            away = np.array([4000.0 * i - 16, 3000.0 * (i % 2) - 13, 0])
            path = write_las(folder / side / f"{i}.las", points + away, classes)
        with path.open("r+b") as file:
            file.truncate(SPARSE_BYTES)
    return folder


def meshes(folder: Path) -> Path:
    """Three tori of different thickness and a tetrahedron, as OFF files."""
    folder.mkdir(parents=True, exist_ok=True)
    for thin in (0.2, 0.3, 0.4):
        _write_torus(folder / f"torus_{round(10 * thin)}.off", thin)
    tetrahedron = "OFF\n4 4 0\n0 0 0\n1 0 0\n0 1 0\n0 0 1\n3 0 2 1\n3 0 1 3\n3 0 3 2\n3 1 2 3\n"
    (folder / "tetrahedron.off").write_text(tetrahedron)
    return folder


def _write_torus(path: Path, thin: float, num: int = 16) -> None:
    u, v = np.meshgrid(*[2 * np.pi * np.arange(num) / num] * 2, indexing="ij")
    radius = 1 + thin * np.cos(v)
    corners = np.stack([radius * np.cos(u), radius * np.sin(u), thin * np.sin(v)], -1)
    i, j = (index.ravel() for index in np.indices((num, num)))
    a, b, c, d = ((i + p) % num * num + (j + q) % num for p, q in ((0, 0), (1, 0), (0, 1), (1, 1)))
    faces = np.concatenate([np.stack([a, b, c], 1), np.stack([b, d, c], 1)])
    lines = [f"OFF\n{num * num} {len(faces)} 0"]
    lines += [" ".join(f"{value:.6f}" for value in corner) for corner in corners.reshape(-1, 3)]
    lines += [f"3 {x} {y} {z}" for x, y, z in faces.tolist()]
    path.write_text("\n".join(lines) + "\n")


def patches(folder: Path) -> Path:
    """An HDF5 file of 30 patches in the layout of the published ones."""
    rng = np.random.default_rng(7)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "patches.h5"
    with h5py.File(path, "w") as file:
        for name, size in (("poisson_256", 32), ("poisson_1024", 128)):
            xy = rng.random((30, size, 2))
            z = 0.3 * np.sin(4 * xy[..., :1] + np.arange(30)[:, None, None])
            file[name] = np.concatenate([xy, z], axis=2).astype(np.float32)
    return path
