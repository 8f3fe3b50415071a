"""Trees, shrubs, grass and dead wood: solid wood, and leaves as small facets. Metres, z up.

Trees and shrubs stand at the origin. A facet is one triangle that represents several leaves; a
scanner's beam can pass between facets.
"""

from __future__ import annotations

import numpy as np

from pointup.synthetic.randomness import log_uniform, rotation
from pointup.synthetic.tessellation import circle, grid, sweep

Plant = tuple[np.ndarray, np.ndarray]


def leaves(
    rng: np.random.Generator, centres: np.ndarray, sizes: np.ndarray, num_leaves: int, leaf: float
) -> np.ndarray:
    """Facets (num_leaves, 3, 3) of size `leaf` in ellipsoids: centres (C, 3), half axes (C, 3)."""
    weight = np.prod(sizes, axis=1)
    clump = rng.choice(len(centres), num_leaves, p=weight / weight.sum())
    offset = rng.normal(size=(num_leaves, 3))
    # Leaves are denser towards the outside of a clump, where there is more light.
    offset *= rng.random((num_leaves, 1)) ** 0.4 / np.linalg.norm(offset, axis=1, keepdims=True)
    facet = rng.normal(size=(num_leaves, 3, 3)) * [0.5, 0.5, 0.35] * leaf
    return (centres[clump] + offset * sizes[clump])[:, None] + facet


def branches(starts: np.ndarray, ends: np.ndarray, thick: float) -> np.ndarray:
    """Three-sided branches from starts (B, 3) to ends (B, 3) that sag slightly and taper."""
    along = ends - starts
    across = np.cross(along, [0.1, 0.2, 1.0])
    across /= np.linalg.norm(across, axis=1, keepdims=True)
    upwards = np.cross(across, along / np.linalg.norm(along, axis=1, keepdims=True))
    rings = []
    # Short triangles are scanned faster than long ones.
    for share, droop in ((0, 0.0), (0.25, 0.075), (0.5, 0.1), (0.75, 0.075), (1, 0.0)):
        line = starts + share * along
        line[:, 2] -= droop * np.linalg.norm(along, axis=1)
        section = circle(3) * thick * (1 - 0.6 * share)
        rings.append([line + x * across + y * upwards for x, y in section])
    return grid(np.array(rings), wrap_columns=True)


def broadleaf(
    rng: np.random.Generator, height: float, foliage: float, spread: float = 1.0
) -> Plant:
    """A broadleaf tree: a trunk, branches, and a crown of leaves, most of them in clumps.

    `foliage` scales the number of leaves; a share of about 0.15 stands for twigs in winter.
    `spread` scales the width of the crown.
    """
    width = spread * height * rng.uniform(0.3, 0.5)
    crown_low = height * rng.uniform(0.1, 0.5)
    lean = np.array([*rng.normal(size=2) * 0.03 * height, 0])
    half = np.array([width / 2, width / 2, (height - crown_low) / 2])
    middle = np.array([0, 0, crown_low + half[2]]) + lean
    num_clumps = rng.integers(20, 60)
    inside = rng.normal(size=(num_clumps, 3))
    inside *= rng.uniform(0.25, 0.95, (num_clumps, 1)) / np.linalg.norm(
        inside, axis=1, keepdims=True
    )
    clump_size = half.mean() * rng.uniform(0.12, 0.32, (num_clumps, 1)) * [1, 1, 0.6]
    centres = middle + inside * (half - 0.5 * clump_size)
    thick = height * rng.uniform(0.006, 0.012)
    top = middle + np.array([0, 0, 0.4 * half[2]])
    trunk = sweep(np.linspace([0, 0, -0.5], top, 6), np.linspace(thick, 0.3 * thick, 6), circle(8))
    starts = rng.uniform(0.4, 0.9, num_clumps) * np.minimum(1, centres[:, 2] / top[2])
    wood = [trunk, branches(starts[:, None] * top, centres, max(0.3 * thick, 0.02))]
    leaf = rng.uniform(0.22, 0.34)
    # Leaf area index (leaf area per ground area) of 3 to 7, in facets of about 0.2 leaf^2.
    num_leaves = int(foliage * rng.uniform(3, 7) * np.pi * half[0] ** 2 / (0.2 * leaf**2))
    num_scattered = int(rng.uniform(0.3, 0.8) * num_leaves)
    facets = [
        leaves(rng, centres, clump_size, num_leaves - num_scattered, leaf),
        leaves(rng, middle[None], half[None], num_scattered, leaf),
    ]
    return np.concatenate(wood), np.concatenate(facets)


def conifer(rng: np.random.Generator, height: float, foliage: float, spread: float = 1.0) -> Plant:
    """A conifer: a trunk up to the top, and whorls of branches that are shorter towards the top.

    Crowns reach from near the ground (spruces) or from high up the trunk (pines) to the top.
    """
    radius = spread * height * rng.uniform(0.08, 0.16)
    thick = height * rng.uniform(0.005, 0.01)
    trunk = sweep(
        np.linspace([0, 0, -0.5], [0, 0, height], 6), np.linspace(thick, 0.02, 6), circle(8)
    )
    crown_low = height * rng.uniform(0.05, 0.65)
    whorls = np.arange(crown_low, 0.98 * height, rng.uniform(0.4, 0.9))
    z = np.repeat(whorls, 5)
    angle = rng.uniform(0, 2 * np.pi, len(z))
    taper = ((height - z) / (height - crown_low)) ** rng.uniform(0.5, 1.0)
    length = (radius * taper + 0.15) * rng.uniform(0.7, 1.1, len(z))
    starts = np.column_stack([0 * z, 0 * z, z])
    reach = np.column_stack([np.cos(angle), np.sin(angle), rng.uniform(-0.5, 0.1, len(z))])
    reach *= length[:, None]
    wood = [trunk, branches(starts, starts + reach, 0.025)]
    centres = np.concatenate([starts + 0.45 * reach, starts + 0.85 * reach])
    sizes = np.tile(length[:, None] * [0.35, 0.35, 0.18], (2, 1))
    leaf = rng.uniform(0.18, 0.3)
    num_leaves = int(foliage * rng.uniform(3, 7) * np.pi * radius**2 / (0.2 * leaf**2))
    return np.concatenate(wood), leaves(rng, centres, sizes, num_leaves, leaf)


def snag(rng: np.random.Generator, height: float) -> np.ndarray:
    """The trunk of a dead tree, broken off, with a few stubs of branches."""
    thick = height * rng.uniform(0.008, 0.018)
    top = np.array([*rng.normal(size=2) * 0.04 * height, height])
    trunk = sweep(np.linspace([0, 0, -0.5], top, 5), np.linspace(thick, 0.5 * thick, 5), circle(8))
    share = rng.uniform(0.3, 1, (rng.integers(2, 9), 1))
    away = rng.normal(size=(len(share), 3)) * [1, 1, 0.4] * rng.uniform(0.4, 2.0)
    return np.concatenate([trunk, branches(share * top, share * top + away, 0.04)])


def log(rng: np.random.Generator) -> np.ndarray:
    """A fallen trunk along x, with its middle at the origin."""
    length, thick = log_uniform(rng, 2, 14), log_uniform(rng, 0.08, 0.35)
    line = np.linspace([-length / 2, 0, 0.8 * thick], [length / 2, 0, 0.6 * thick], 5)
    return sweep(line, np.linspace(thick, 0.6 * thick, 5), circle(8))


def shrub(rng: np.random.Generator, height: float, foliage: float) -> Plant:
    """A shrub of one to five clumps of leaves on the ground."""
    num_clumps = rng.integers(1, 6)
    sizes = height * rng.uniform(0.3, 0.6, (num_clumps, 3))
    centres = rng.normal(size=(num_clumps, 3)) * height * 0.35
    centres[:, 2] = sizes[:, 2] * rng.uniform(0.6, 1.2, num_clumps)
    leaf = rng.uniform(0.12, 0.22)
    area = np.pi * np.prod(sizes[:, :2], axis=1).sum()
    num_leaves = int((0.3 + foliage) * rng.uniform(1.5, 4) * area / (0.2 * leaf**2))
    stems = branches(np.zeros_like(centres), centres, 0.03)
    return stems, leaves(rng, centres, sizes, num_leaves, leaf)


def grass(rng: np.random.Generator, places: np.ndarray) -> np.ndarray:
    """Upright blades of grass (N, 3, 3), one at each place (N, 3)."""
    size = log_uniform(rng, 0.08, 0.4)
    turn = rotation(rng)[:2, :2]
    blade = rng.normal(size=(len(places), 3, 3)) * [0.25, 0.25, 0.0]
    blade[..., :2] = blade[..., :2] @ turn
    blade[:, 2, 2] = rng.uniform(0.5, 1.5, len(places))
    return places[:, None] + size * blade
