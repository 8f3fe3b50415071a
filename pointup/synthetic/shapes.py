"""Random procedural surfaces of many families, for training without meshes.

Each family draws one triangle soup from a random generator. Together the families have the features
of real meshes: smooth bodies with limbs, sharp edges, holes, thin plates and wires, sheets close to
each other, open borders, and assembled parts.
"""

from __future__ import annotations

import numpy as np

from pointup.geometry.surfaces import Surface
from pointup.synthetic.fields import displace, log_uniform, rotation
from pointup.synthetic.solids import (
    CLOSE_SIDES,
    blob,
    blocks,
    branching,
    creature,
    flange,
    frame,
    furniture,
    metaballs,
    open_sheet,
    polyhedron,
    prism,
    ring,
    rotor,
    shell,
    superquadric,
    tubes,
    vase,
)
from pointup.synthetic.tessellation import cut, refine, surface_of, union

SOLID = (superquadric, blob, ring, vase, polyhedron, prism, blocks, flange)


def assembly(rng: np.random.Generator) -> np.ndarray:
    """A union of two to four solids that intersect or lie side by side."""
    parts: list[np.ndarray] = []
    size = 1.0
    for _ in range(rng.integers(2, 5)):
        part = SOLID[rng.integers(len(SOLID))](rng)
        part = part - part.mean(axis=(0, 1))
        part = part / np.linalg.norm(part, axis=2).max() * size
        if rng.random() < 0.5:
            part = part @ rotation(rng)
        if parts:
            anchor = parts[0].reshape(-1, 3)
            part = part + anchor[rng.integers(len(anchor))] * rng.uniform(0.5, 1.1)
        parts.append(part)
        size = rng.uniform(0.25, 0.8)
    return union(parts, 0.07)


ORGANIC = (blob, tubes, creature, branching, metaballs)
FAMILIES = {
    creature: 5,
    branching: 2,
    metaballs: 2,
    blob: 2,
    tubes: 2,
    ring: 1,
    superquadric: 1,
    vase: 2,
    polyhedron: 1,
    prism: 3,
    blocks: 2,
    furniture: 2,
    flange: 2,
    shell: 2,
    open_sheet: 2,
    frame: 1,
    rotor: 1,
    assembly: 4,
}


def deform(triangles: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Deform triangles by a random subset of taper, twist, bend and smooth displacement.

    The first three are about a random axis.
    """
    turn = rotation(rng) if rng.random() < 0.5 else np.eye(3)[rng.permutation(3)]
    points = refine(triangles, 0.08) @ turn
    x, y, z = np.moveaxis(points, -1, 0)
    if rng.random() < 0.4:
        factor = 1 + rng.uniform(-0.5, 0.5) * z
        x, y = x * factor, y * factor
    if rng.random() < 0.4:
        angle = rng.uniform(-1.2, 1.2) * z
        x, y = x * np.cos(angle) - y * np.sin(angle), x * np.sin(angle) + y * np.cos(angle)
    if rng.random() < 0.5:
        curvature = rng.uniform(0.1, 0.9)
        angle, radius = curvature * z, 1 / curvature - x
        x, z = 1 / curvature - radius * np.cos(angle), radius * np.sin(angle)
    points = np.stack([x, y, z], axis=-1)
    if rng.random() < 0.5:
        frequency = rng.uniform(0.7, 2.5)
        points = displace(points, rng, frequency, rng.uniform(0, 0.25) / frequency)
    return points @ turn.T


def random_surface(rng: np.random.Generator, close_sides: bool = False) -> tuple[Surface, str]:
    """A random surface and the name of its family.

    The bounding box is centred on the origin, and the largest distance of a vertex is 1.
    `close_sides` draws from CLOSE_SIDES, surfaces whose sides are close to each other.
    """
    weight_of = CLOSE_SIDES if close_sides else FAMILIES
    families = list(weight_of)
    weights = np.array(list(weight_of.values()), dtype=float)
    family = families[rng.choice(len(families), p=weights / weights.sum())]
    triangles = family(rng)
    low, high = triangles.min(axis=(0, 1)), triangles.max(axis=(0, 1))
    triangles = (triangles - (low + high) / 2) * (2 / np.linalg.norm(high - low))
    if rng.random() < 0.5:
        triangles = triangles * log_uniform(rng, 0.6, 1.6, 3)
    if rng.random() < (0.6 if family in ORGANIC else 0.2):
        triangles = deform(triangles, rng)
    if family in ORGANIC and rng.random() < 0.1:
        triangles = cut(triangles, lambda points: points[:, 2] < -0.3, 0.08)
    return surface_of(triangles).normalized(), family.__name__
