"""Thin and open procedural surfaces: sheets, shells, frames, blades."""

from __future__ import annotations

from functools import partial

import numpy as np
from scipy.spatial import ConvexHull

from pointup.synthetic.randomness import log_uniform, waves
from pointup.synthetic.tessellation import (
    circle,
    curve,
    cut,
    grid,
    outwards,
    refine,
    revolve,
    sphere,
    sweep,
    union,
)


def sheet(rng: np.random.Generator, num_cells: int = 44) -> np.ndarray:
    """A grid of points (rows, columns, 3) on an open surface: ruffles, caps, saddles, pipes."""
    u, v = np.meshgrid(*[np.linspace(-1, 1, num_cells)] * 2, indexing="ij")
    kind = rng.integers(5)
    if kind == 0:
        ruffle = waves(rng, rng.uniform(1, 3), dimension=2)
        flat = np.stack([u, v], axis=-1)
        return np.stack([u, v, rng.uniform(0.05, 0.4) * ruffle(flat)], axis=-1)
    if kind == 1:  # cap on a disc
        radius, angle = (u + 1) / 2, np.pi * v
        x, y = radius * np.cos(angle), radius * np.sin(angle)
        a, b = rng.uniform(-0.3, 1.2, 2)
        return np.stack([x, y, a * x * x + b * y * y], axis=-1)
    if kind == 2:  # part of a pipe
        angle = v * rng.uniform(0.4, 1) * np.pi * 0.9
        cone = rng.uniform(0.3, 0.8) * (1 + rng.uniform(0, 0.6) * u)
        return np.stack([u, cone * np.sin(angle), cone * np.cos(angle)], axis=-1)
    if kind == 3:  # saddle or blade
        return np.stack(
            [
                u,
                v * rng.uniform(0.2, 1) * (1.2 - u * u),
                rng.uniform(-1, 1) * u * v + rng.uniform(-0.5, 0.5) * u * u,
            ],
            axis=-1,
        )
    rail = curve(rng.normal(size=(5, 2)) * 0.5 + np.linspace(-1, 1, 5)[:, None] * [1, 0], num_cells)
    return np.stack([rail[:, :1] + 0 * v, v * rng.uniform(0.3, 1), rail[:, 1:] + 0 * v], axis=-1)


def grid_normals(positions: np.ndarray) -> np.ndarray:
    """Unit normals (rows, columns, 3) of a grid of points; zero where a row is a single point."""
    rows, columns = (np.gradient(positions, axis=axis) for axis in (0, 1))
    normals = np.cross(rows, columns)
    return normals / np.maximum(np.linalg.norm(normals, axis=-1, keepdims=True), 1e-9)


def open_sheet(rng: np.random.Generator) -> np.ndarray:
    """An open surface, some with holes, some as two or three parallel sheets close together."""
    triangles = grid(sheet(rng))
    for _ in range(rng.choice([0, 0, 1, 3])):
        centre, radius = triangles[rng.integers(len(triangles)), 0], rng.uniform(0.1, 0.35)
        triangles = cut(triangles, partial(inside_ball, centre=centre, radius=radius), 0.06)
    if rng.random() < 0.25:
        gap = np.array([0, 0, rng.uniform(0.05, 0.25)])
        triangles = np.concatenate([triangles + i * gap for i in range(rng.integers(2, 4))])
    return triangles


def inside_ball(points: np.ndarray, centre: np.ndarray, radius: float) -> np.ndarray:
    """Mask (N,) bool of the points (N, 3) that are inside a ball."""
    return np.linalg.norm(points - centre, axis=1) < radius


def shell(rng: np.random.Generator) -> np.ndarray:
    """A closed sheet of small thickness: two parallel sides and a rim."""
    middle = sheet(rng)
    normals = grid_normals(middle)
    half = log_uniform(rng, 0.01, 0.06)
    top, bottom = middle + half * normals, middle - half * normals
    rim = [
        np.concatenate([side[0], side[1:, -1], side[-1, -2::-1], side[-2:0:-1, 0]])
        for side in (top, bottom)
    ]
    sides = [grid(top), grid(bottom)[:, ::-1], grid(np.stack(rim)[:, ::-1], wrap_columns=True)]
    return outwards(np.concatenate(sides))


def frame(rng: np.random.Generator) -> np.ndarray:
    """Bars along the edges of boxes or a polyhedron: cages, trusses, climbing frames."""
    if rng.random() < 0.5:
        corners = np.indices((2, 2, int(rng.integers(2, 4)))).reshape(3, -1).T
        nodes = corners * rng.uniform(0.4, 1.2, 3) + rng.normal(size=corners.shape) * 0.04
        steps = np.abs(corners[:, None] - corners).sum(axis=2)
        braced = (steps == 2) & (rng.random(steps.shape) < rng.choice([0, 0.4]))
        pairs = np.argwhere(np.triu((steps == 1) | braced, k=1))
    else:
        nodes = rng.normal(size=(rng.integers(5, 11), 3))
        nodes = nodes / np.linalg.norm(nodes, axis=1, keepdims=True)
        simplices = np.sort(ConvexHull(nodes).simplices, axis=1)
        pairs = np.unique(simplices[:, [[0, 1], [1, 2], [0, 2]]].reshape(-1, 2), axis=0)
    radius, knot = log_uniform(rng, 0.025, 0.08), rng.choice([1, rng.uniform(1.3, 2.5)])
    outline = circle(int(rng.choice([4, 14]))) * radius
    starts = np.concatenate([nodes[pairs[:, 0]], nodes])
    ends = np.concatenate([nodes[pairs[:, 1]], nodes])
    inner = np.linalg.norm(outline[0] + outline[1]) / 2 * np.ones(len(starts))
    inner[len(pairs) :] *= knot
    bars = [sweep(np.linspace(nodes[i], nodes[j], 9), np.ones(9), outline) for i, j in pairs]
    balls = [sphere(0.3) * knot * radius + node for node in nodes]
    kept = []
    for number, part in enumerate([refine(bar, 0.08) for bar in bars] + balls):
        # Triangles inside another bar or ball are removed.
        middles, along = part.mean(axis=1)[:, None], ends - starts
        share = ((middles - starts) * along).sum(axis=2) / (np.square(along).sum(axis=1) + 1e-12)
        nearest = starts + share.clip(0, 1)[..., None] * along
        inside = np.linalg.norm(middles - nearest, axis=2) < inner
        inside[:, number] = False
        kept.append(part[~inside.any(axis=1)])
    return np.concatenate(kept)


def rotor(rng: np.random.Generator) -> np.ndarray:
    """A hub with blades or fins, like a fan, a turbine, a rocket or a propeller."""
    height, radius = rng.uniform(0.15, 1.2), rng.uniform(0.1, 0.3)
    profile = np.array([[0, -1], [1, -1], [1, 0.6], [0.6, 1], [0, 1]]) * [radius, height / 2]
    pitch, twist = rng.uniform(0, np.pi / 2), rng.uniform(-0.8, 0.8)
    thick, chord = rng.uniform(0.015, 0.05), rng.uniform(0.1, 0.45)
    if pitch < 0.5:
        chord = min(chord, height / 2)
    share = np.linspace(0, 1, 12)[:, None]
    x = chord * (1 - 0.4 * share**2) * circle(20)[:, 0]
    y = np.broadcast_to(thick * circle(20)[:, 1], x.shape)
    sine, cosine = np.sin(pitch + twist * share), np.cos(pitch + twist * share)
    outwards_along = np.broadcast_to(radius / 2 + share * (1 - radius / 2), x.shape)
    rings = np.stack([outwards_along, x * sine + y * cosine, x * cosine - y * sine], axis=2)
    tips = np.broadcast_to(rings[[0, -1]].mean(axis=1, keepdims=True), (2, *rings.shape[1:]))
    blade = outwards(grid(np.concatenate([tips[:1], rings, tips[1:]]), wrap_columns=True))
    parts = [outwards(revolve(profile, 40))]
    for c, s in circle(int(rng.integers(2, 7))):
        parts.append(blade @ np.array([[c, s, 0], [-s, c, 0], [0, 0, 1]]))
    return union(parts, 0.08)
