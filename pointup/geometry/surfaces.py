"""Surfaces: triangle meshes as ground truth, and planes and quadrics fitted to points."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias
from zipfile import ZipFile

import numpy as np

from pointup.disk import check_expansion
from pointup.errors import DataError, FileError

# Random candidates per kept point. More of them give a more even spacing and cost more time.
OVERSAMPLING = 5


@dataclass(frozen=True)
class Surface:
    """A triangle mesh, open or closed, of one or several parts.

    `vertices` is (V, 3) float64 and `faces` (F, 3) int64. Build it with `from_triangles`, which
    checks and cleans its input. The order of a face's vertices gives the direction of its normal.
    """

    vertices: np.ndarray
    faces: np.ndarray

    @classmethod
    def from_triangles(cls, vertices: np.ndarray, faces: np.ndarray) -> Surface:
        """The surface of triangles, without degenerate faces and unused vertices.

        Raises DataError for wrong shapes, non-finite vertices, indices out of range, and where no
        face has an area.
        """
        vertices = np.asarray(vertices, dtype=np.float64)
        faces = np.asarray(faces)
        if vertices.ndim != 2 or vertices.shape[1] != 3:
            raise DataError(f"mesh vertices must be (V, 3), not {vertices.shape}")
        if faces.ndim != 2 or faces.shape[1] != 3 or not np.issubdtype(faces.dtype, np.integer):
            raise DataError(
                f"mesh faces must be (F, 3) integers, not {faces.dtype} {faces.shape}: "
                "triangulate the mesh"
            )
        faces = faces.astype(np.int64)
        num_bad = int(np.count_nonzero(~np.isfinite(vertices).all(axis=1)))
        if num_bad:
            raise DataError(f"{num_bad} mesh vertices are not finite: remove or repair them")
        if len(faces) and (faces.min() < 0 or faces.max() >= len(vertices)):
            raise DataError(
                f"mesh faces name vertices {faces.min()} to {faces.max()}, "
                f"but only 0 to {len(vertices) - 1} exist"
            )
        corners = vertices[faces]
        edges = corners - np.roll(corners, 1, axis=1)
        longest = np.square(edges).sum(axis=2).max(axis=1, initial=0.0)
        doubled = np.linalg.norm(np.cross(edges[:, 0], edges[:, 1]), axis=1)
        faces = faces[doubled > 1e-12 * longest]
        if not len(faces):
            raise DataError("the mesh has no face with an area: a surface is needed, not points")
        used, renumbered = np.unique(faces, return_inverse=True)
        return cls(vertices[used], renumbered.reshape(-1, 3))

    @cached_property
    def _crosses(self) -> np.ndarray:
        corners = self.vertices[self.faces]
        return np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])

    @cached_property
    def _cumulative_area(self) -> np.ndarray:
        return np.cumsum(0.5 * np.linalg.norm(self._crosses, axis=1))

    @property
    def area(self) -> float:
        """Sum of the areas of all faces, counting one side of each."""
        return float(self._cumulative_area[-1])

    def sample(self, num_points: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Independent random points, uniform by area.

        Returns points and unit normals of their faces, both (num_points, 3) float64.
        """
        cumulative = self._cumulative_area
        face = np.searchsorted(cumulative, rng.random(num_points) * cumulative[-1], side="right")
        face = np.minimum(face, len(self.faces) - 1)
        # Uniform in the triangle: Osada et al., Shape Distributions, 2002.
        root = np.sqrt(rng.random((num_points, 1)))
        share = rng.random((num_points, 1))
        a, b, c = np.moveaxis(self.vertices[self.faces[face]], 1, 0)
        points = a + root * ((b - a) + share * (c - b))
        normals = self._crosses[face]
        return points, normals / np.linalg.norm(normals, axis=1, keepdims=True)

    def poisson_disk(
        self, num_points: int, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Poisson-disk (blue-noise) points: evenly spaced, without a pattern.

        Random candidates are thinned to exactly `num_points`. Returns points and unit normals of
        their faces, both (num_points, 3) float64.
        """
        # Imported here: thinning needs torch, and reading a mesh must not.
        from pointup.geometry.thinning import poisson_disk_subset

        points, normals = self.sample(OVERSAMPLING * num_points, rng)
        keep = poisson_disk_subset(points, num_points, rng)
        return points[keep], normals[keep]

    def distance(self, points: np.ndarray) -> np.ndarray:
        """Exact unsigned distance from each point (N, 3) to the surface, (N,) float64.

        Raises ValueError for points of another shape.
        """
        import igl

        points = np.asarray(points, dtype=np.float64)
        if points.ndim != 2 or points.shape[1] != 3:
            raise ValueError(f"points must be (N, 3), not {points.shape}")
        if not len(points):
            return np.zeros(0)
        # Centred: squares of map coordinates are not exact to a millimetre.
        centre = self.vertices.mean(axis=0)
        squared, _, _ = igl.point_mesh_squared_distance(
            points - centre, self.vertices - centre, self.faces
        )
        return np.sqrt(squared)

    def normalized(self) -> Surface:
        """The surface with its bounding box centred and its farthest vertex at distance 1."""
        centred = self.vertices - 0.5 * (self.vertices.min(axis=0) + self.vertices.max(axis=0))
        return Surface(centred / np.linalg.norm(centred, axis=1).max(), self.faces)

    def save(self, path: str | Path) -> None:
        """Write an .npz with `vertices` (V, 3) float64 and `faces` (F, 3)."""
        faces = self.faces.astype(np.int32 if len(self.vertices) < 2**31 else np.int64)
        with Path(path).open("wb") as file:
            np.savez_compressed(file, vertices=self.vertices, faces=faces)

    @classmethod
    def load(cls, path: str | Path) -> Surface:
        """Read a file of `save`. Raises FileError for a missing file and for any other content."""
        try:
            with ZipFile(path) as archive:
                check_expansion(Path(path), sum(each.file_size for each in archive.infolist()))
            with np.load(path) as arrays:
                return cls.from_triangles(arrays["vertices"], arrays["faces"])
        except FileNotFoundError:
            raise FileError(f"{path}: no such file") from None
        except FileError:
            raise
        # zipfile, zlib and NumPy have no error class in common.
        except Exception:
            raise FileError(
                f"{path}: not a surface: expected an .npz with vertices and faces"
            ) from None


# Planes and quadrics fitted to the neighbours of points (moving least squares).
#
# See Alexa et al., "Computing and rendering point set surfaces", 2003.

# The weights of a fit decrease to exp(-value) at the last neighbour.
_PLANE_FALL, _QUADRIC_FALL = 4.0, 5.0
# Ridge terms against underdetermined fits, with the distance of the furthest neighbour as unit. The
# term of the height is small, since it would keep a point where it is. The others are invariant
# under rotation of x and y.
_RIDGE = (1e-9, 1e-3, 1e-3, 1e-3, 5e-4, 1e-3)
_TINY = float(np.finfo(np.float64).tiny)
# ROCm solves a batch of more systems wrongly, without an error.
_MOST_SYSTEMS = 65_535


Array: TypeAlias = Any
"""A NumPy array or, in the same operations, a tensor on a device."""


def library(values: Array) -> Any:
    """The module that computes with `values`: NumPy or torch."""
    if isinstance(values, np.ndarray):
        return np
    import torch

    return torch


def contiguous(values: Array) -> Array:
    """The values in the order of their axes in memory."""
    return np.ascontiguousarray(values) if isinstance(values, np.ndarray) else values.contiguous()


def rows_at(values: Array, index: Array) -> Array:
    """`values[index]` of values (N, D): with NumPy in a quarter of the time."""
    return values.take(index, axis=0) if isinstance(values, np.ndarray) else values[index]


def principal_axes(around: Array, distance: Array) -> tuple[Array, Array]:
    """Principal axes (Q, 3, 3) of points (Q, K, 3) at `distance` (Q, K): normal, narrow, long.

    And the variances (Q, 3) along them, up to a common factor.
    """
    xp = library(around)
    # Points may be closer than the smallest number.
    farthest = distance[:, -1:].clip(min=_TINY)
    weight = xp.exp(-_PLANE_FALL * xp.square(distance / farthest))
    mean = (weight[:, None] @ around)[:, 0] / weight.sum(axis=1)[:, None]
    away = around - mean[:, None]
    return eigenvectors((away * weight[..., None]).swapaxes(1, 2) @ away)


def eigenvectors(matrices: Array) -> tuple[Array, Array]:
    """Unit eigenvectors, columns of (Q, 3, 3), and eigenvalues (Q, 3), ascending, of positive
    semidefinite matrices (Q, 3, 3); any axes where eigenvalues are equal.

    All matrices at once: `np.linalg.eigh` takes six times as long. The eigenvalue farthest from the
    others comes first (Eberly 2014, "A robust eigensolver for 3 x 3 symmetric matrices").
    """
    xp = library(matrices)
    (xx, xy, xz), (_, yy, yz), (_, _, zz) = contiguous(xp.moveaxis(matrices, 0, 2))
    middle = (xx + yy + zz) / 3
    ax, ay, az = xx - middle, yy - middle, zz - middle
    radius = xp.sqrt((ax * ax + ay * ay + az * az + 2 * (xy * xy + xz * xz + yz * yz)) / 6)
    most = radius.clip(min=_TINY)
    a, b, c, d, e, f = (of_axes / most for of_axes in (ax, ay, az, xy, xz, yz))
    skew = (a * (b * c - f * f) - d * (d * c - f * e) + e * (d * f - b * e)) / 2
    largest_first = skew > 0
    angle = xp.arccos(skew.clip(-1, 1)) / 3
    first = 2 * xp.cos(xp.where(largest_first, angle, angle + 2 * np.pi / 3))
    a, b, c = a - first, b - first, c - first
    # Products of two rows are perpendicular to all; the longest has the smallest rounding error.
    rows = [
        [d * f - e * b, e * d - a * f, a * b - d * d],
        [b * c - f * f, f * e - d * c, d * f - b * e],
        [f * e - c * d, c * a - e * e, e * d - f * a],
    ]
    products = xp.stack([xp.stack(row) for row in rows])
    squared = (products * products).sum(axis=1)
    longest, length = squared.argmax(axis=0), xp.sqrt(xp.amax(squared, axis=0))
    one = xp.where(longest == 1, products[1], xp.where(longest == 2, products[2], products[0]))
    one = one / length.clip(min=_TINY)
    # Two directions perpendicular to it, and the eigenvectors in their plane.
    x, y, z = one
    z[...] = xp.where(length == 0, 1.0, z)
    flat = xp.abs(z) < 0.7
    u = xp.stack([xp.where(flat, y, 0 * x), xp.where(flat, -x, z), xp.where(flat, 0 * z, -y)])
    u /= xp.sqrt((u * u).sum(axis=0))
    v = xp.stack([y * u[2] - z * u[1], z * u[0] - x * u[2], x * u[1] - y * u[0]])

    def product(s: Array, t: Array) -> Array:
        of_t = [xx * t[0] + xy * t[1] + xz * t[2], xy * t[0] + yy * t[1] + yz * t[2]]
        return s[0] * of_t[0] + s[1] * of_t[1] + s[2] * (xz * t[0] + yz * t[1] + zz * t[2])

    uu, uv, vv = product(u, u), product(u, v), product(v, v)
    angle = xp.arctan2(2 * uv, uu - vv) / 2
    long = xp.cos(angle) * u + xp.sin(angle) * v
    short = xp.cos(angle) * v - xp.sin(angle) * u
    half, apart = (uu + vv) / 2, xp.hypot((uu - vv) / 2, uv)
    own = middle + radius * first

    def in_order(one: Array, short: Array, long: Array) -> Array:
        columns = [(short, one), (long, short), (one, long)]
        return xp.stack([xp.where(largest_first, *column) for column in columns])

    frame, values = in_order(one, short, long), in_order(own, half - apart, half + apart)
    return xp.moveaxis(frame, 2, 0).swapaxes(1, 2), values.T


def surface_height(around: Array, scale: Array, factor: Array | float = 1.0) -> tuple[Array, Array]:
    """Height (Q,) at the origin of the surface through the points `around` (Q, K, 3), and the
    weighted root mean square (Q,) of their distances to it along the normal.

    The surface is z = a + bx + cy + dxx + exy + fyy, fitted by weighted least squares. The first
    coordinate of the points is the height. scale: (Q,), about the distance of the furthest point.
    factor: (Q, K), additional weight of each point.
    """
    xp = library(around)
    z, y, x = xp.moveaxis(around / scale[:, None, None], 2, 0)
    weight = factor * xp.exp(-_QUADRIC_FALL * (x * x + y * y + z * z))
    terms = xp.stack([xp.ones_like(x), x, y, x * x, x * y, y * y], axis=2)
    weighted = (terms * weight[..., None]).swapaxes(1, 2)
    ridge = np.diag(_RIDGE) if xp is np else xp.asarray(np.diag(_RIDGE)).to(around.device)
    systems = weighted @ terms + ridge, weighted @ z[..., None]
    if xp is np:
        fitted = np.linalg.solve(*systems)
    else:
        parts = zip(*(side.split(_MOST_SYSTEMS) for side in systems), strict=True)
        fitted = xp.cat([xp.linalg.solve(*part) for part in parts])
    off = z - (terms @ fitted)[..., 0]
    residual = xp.sqrt((weight * off * off).sum(axis=1) / weight.sum(axis=1))
    return scale * fitted[:, 0, 0], scale * residual
