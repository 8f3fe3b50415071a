"""A building site of a landscape, and the plants and man-made objects that stand on it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from pointup.synthetic.fields import Field, log_uniform, rotation
from pointup.synthetic.tessellation import cells, circle, grid, hull, sweep

SHIFTS = np.array([[x, y] for x in (-1, 0, 1) for y in (-1, 0, 1) if x or y])


class PlacedPlant(NamedTuple):
    """A tree or shrub of a site."""

    wood: int
    """Its place in `Site.solid`."""
    foliage: int
    """Its place in `Site.rough`."""
    foot: np.ndarray
    """(3,) where it stands."""


class Site:
    """Places objects on the ground at distances from each other."""

    def __init__(self, rng: np.random.Generator, height: Field, extent: float) -> None:
        self.rng, self.height, self.extent = rng, height, extent
        self.solid: list[np.ndarray] = []
        self.rough: list[np.ndarray] = []
        self.plants: list[PlacedPlant] = []
        self.taken = np.empty((0, 3))

    def place(self, clearance: float, reach: float = 1.0) -> np.ndarray | None:
        """A random free spot (3,) on the ground; None if 10 attempts find none."""
        for _ in range(10):
            spot = self.rng.uniform(-0.5, 0.5, 2) * self.extent * reach
            apart = np.linalg.norm(self.taken[:, :2] - spot, axis=1)
            if (apart >= self.taken[:, 2] + clearance).all():
                self.taken = np.concatenate([self.taken, [[*spot, clearance]]])
                return np.array([*spot, self.height(spot)])
        return None

    def turned(self, triangles: np.ndarray, angle: float | None = None) -> np.ndarray:
        """Rotate triangles about the vertical, by a random angle if none is given."""
        angle = self.rng.uniform(0, 2 * np.pi) if angle is None else angle
        c, s = np.cos(angle), np.sin(angle)
        return triangles @ np.array([[c, s, 0], [-s, c, 0], [0, 0, 1]])

    def put(self, triangles: np.ndarray, clearance: float, reach: float = 0.7) -> None:
        """Place a solid object in the inner part `reach` of the site, if there is a free spot."""
        spot = self.place(clearance, reach)
        if spot is not None:
            self.solid.append(self.turned(triangles) + spot)

    def put_line(self) -> None:
        """Place a power line across the site: a row of poles with wires between them."""
        angle, tall = self.rng.uniform(0, 2 * np.pi), self.rng.uniform(5, 11)
        along = np.array([np.cos(angle), np.sin(angle)])
        aside = np.array([-along[1], along[0]]) * self.rng.uniform(-0.3, 0.3) * self.extent
        span = self.rng.uniform(25, 45)
        first = self.rng.uniform(-1, 0) * span
        feet = [along * (first + i * span) + aside for i in range(-1, 3)]
        heads = [np.array([*foot, self.height(foot) + tall]) for foot in feet]
        post = self.turned(pole(self.rng, tall), angle)
        self.solid += [post + head - [0, 0, tall] for head in heads]
        for start, end in pairwise(heads):
            self.rough.append(wires(start - [0, 0, 0.3], end - [0, 0, 0.3], 0.02 * span))

    def grow(self, make: Callable[[], Plant], clearance: float) -> bool:
        """Add the wood and the leaves of a plant; returns False if there is no free spot."""
        spot = self.place(clearance)
        if spot is None:
            return False
        wood, foliage = make()
        self.plants.append(PlacedPlant(len(self.solid), len(self.rough), spot))
        self.solid.append(wood + spot)
        self.rough.append(foliage + spot)
        return True

    def lay(self, triangles: np.ndarray) -> None:
        """Lay a long object along the ground at a random place."""
        middle = self.rng.uniform(-0.5, 0.5, 2) * self.extent
        lying = self.turned(triangles)
        lying[..., :2] += middle
        lying[..., 2] += self.height(lying[..., :2].mean(axis=1))[:, None]
        self.solid.append(lying)

    def sow(self, num_blades: int) -> None:
        """Add blades of grass at uniformly random places."""
        spots = self.rng.uniform(-0.5, 0.5, (num_blades, 2)) * self.extent
        self.rough.append(grass(self.rng, np.column_stack([spots, self.height(spots)])))

    def with_surroundings(
        self, objects: list[np.ndarray], reach: float, every: int = 1
    ) -> np.ndarray:
        """The triangles of all objects, and copies shifted by the extent, to `reach` around it.

        Oblique beams enter the scanned square through what stands around it. Without the copies
        they would pass below the crowns at its edge. Beyond the extent, where they only cast
        shadows, the copies have one of `every` facets, each `every` times as large.
        """
        parts = [np.empty((0, 3, 3)), *objects]
        half = self.extent / 2
        for triangles in filter(len, objects):
            # Sums and maxima by column: much faster than reductions over an axis of two or three.
            middle = (triangles[:, 0] + triangles[:, 1] + triangles[:, 2]) / 3
            chosen = middle[::every, None]
            coarse = chosen + (triangles[::every] - chosen) * every**0.5
            foot = middle[:, :2].mean(axis=0)
            x, y = middle[:, 0].copy(), middle[:, 1].copy()
            low, high = np.array([x.min(), y.min()]), np.array([x.max(), y.max()])
            for shift in self.extent * SHIFTS:
                if np.maximum(low + shift, -(high + shift)).max() - half > max(reach, 0):
                    continue
                away = np.maximum(np.abs(x + shift[0]), np.abs(y + shift[1])) - half
                away_coarse = away[::every]
                inside, near = away <= 0, (away_coarse > 0) & (away_coarse <= reach)
                if inside.any() or near.any():
                    move = [*shift, self.height(foot + shift) - self.height(foot)]
                    parts += [triangles[inside] + move, coarse[near] + move]
        return np.concatenate(parts)


# Man-made objects of landscapes: houses, walls, fences, poles, wires, cars. Metres, z up.
#
# Each function returns triangle soups (F, 3, 3) float64. Houses, fences, cars and poles are placed
# at the origin, with the ground at z = 0. All but cars reach `FOUNDATION` below it, so that they
# also stand on slopes.

FOUNDATION = 1.5


def box(low: ArrayLike, high: ArrayLike) -> np.ndarray:
    """A box between two opposite corners (3,)."""
    return hull(np.where(np.indices((2, 2, 2)).reshape(3, -1).T, high, low).astype(float))


def house(rng: np.random.Generator) -> np.ndarray:
    """A house with a flat, lean-to, gable or hip roof, some with a chimney or an annex."""
    length, depth = rng.uniform(5, 14), rng.uniform(4, 9)
    eaves_height = rng.uniform(2.3, 3.2) * rng.integers(1, 4)
    half = np.array([length, depth]) / 2
    parts = [box([*-half, -FOUNDATION], [*half, eaves_height])]
    parts += roof(rng, half, eaves_height)
    if rng.random() < 0.5:
        place = rng.uniform(-0.35, 0.35, 2) * [length, depth]
        size = rng.uniform(0.25, 0.5, 2)
        top = eaves_height + rng.uniform(0.4, 0.5) * depth + 0.3
        parts.append(box([*place - size, eaves_height], [*place + size, top]))
    if rng.random() < 0.4:
        wing = half * rng.uniform(0.3, 0.6, 2)
        lower = eaves_height * rng.uniform(0.5, 0.9)
        annex = [box([*-wing, -FOUNDATION], [*wing, lower]), *roof(rng, wing, lower)]
        shift = np.array([*(half + wing * 0.9) * [rng.choice([-1, 1]), 0], 0])
        parts += [part + shift for part in annex]
    return np.concatenate(parts)


def roof(rng: np.random.Generator, half: np.ndarray, height: float) -> list[np.ndarray]:
    """The solids of a roof at `height`, on walls of half size `half` (2,); the ridge is along x."""
    kind, pitch = rng.integers(5), rng.uniform(0.3, 1.0)
    if kind == 0:  # flat, with a parapet
        rim = np.ones((3, 3, 1), dtype=bool)
        rim[1, 1] = False
        sides = [np.array([-size, 0.25 - size, size - 0.25, size]) for size in half]
        return [cells(rim, [*sides, np.array([height, height + rng.uniform(0.1, 0.8)])])]
    eaves = half + rng.uniform(0.1, 0.6)
    corners = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]]) * eaves
    base = [[*corner, height + lift] for corner in corners for lift in (0, 0.12)]
    rise = pitch * eaves[1]
    if kind == 1:  # lean-to
        ridge = [[-eaves[0], eaves[1], height + rise], [eaves[0], eaves[1], height + rise]]
    else:
        end = eaves[0] - (eaves[1] * rng.uniform(0.6, 1) if kind == 2 else 0)
        ridge = [[-max(end, 0), 0, height + rise], [max(end, 0), 0, height + rise]]
    return [hull(np.array(base + ridge))]


def fence(rng: np.random.Generator) -> np.ndarray:
    """A wall, a board fence or a trimmed hedge: a box."""
    length, height = rng.uniform(5, 20), rng.uniform(0.7, 2.2)
    thick = rng.choice([0.05, 0.25, 0.8])
    return box([-length / 2, -thick / 2, -FOUNDATION], [length / 2, thick / 2, height])


def car(rng: np.random.Generator) -> np.ndarray:
    """A car or a van made of two wedges."""
    length, width, height = rng.uniform([3.8, 1.6, 1.4], [5.5, 2.0, 2.4])
    bonnet, waist = rng.uniform(0.05, 0.3), 0.55 * height

    def wedge(low: float, high: float, front: float, inset: float) -> np.ndarray:
        sides = np.array([[-1, -1], [front, -1], [front, 1], [-1, 1]]) / 2
        bottom = np.column_stack([sides * [length, width], np.full(4, low)])
        top = np.column_stack([sides * [length * inset, width * inset], np.full(4, high)])
        return hull(np.concatenate([bottom, top]))

    return np.concatenate([wedge(0.25, waist, 1, 0.95), wedge(waist, height, 1 - 2 * bonnet, 0.85)])


def pole(rng: np.random.Generator, height: float) -> np.ndarray:
    """A lamp post or power pole of this height, with a cross-arm along y."""
    thick = rng.uniform(0.05, 0.16)
    line = np.linspace([0, 0, -FOUNDATION], [0, 0, height], 4)
    shaft = sweep(line, np.ones(4), circle(8) * thick)
    arm = box([-0.06, -1, height - 0.5], [0.06, 1, height - 0.35])
    return np.concatenate([shaft, arm])


def wires(start: np.ndarray, end: np.ndarray, sag: float) -> np.ndarray:
    """Three parallel wires between two pole heads (3,), with a sag in metres at mid-span."""
    share = np.linspace(0, 1, 24)[:, None]
    line = start + share * (end - start) - [0, 0, 4 * sag] * share * (1 - share)
    along = (end - start)[:2] / np.linalg.norm((end - start)[:2])
    aside = np.array([-along[1], along[0], 0])
    lines = [line + shift * aside for shift in (-0.9, 0.0, 0.9)]
    return np.concatenate([sweep(each, np.ones(len(each)), circle(4) * 0.02) for each in lines])


# Trees, shrubs, grass and dead wood: solid wood, and leaves as small facets. Metres, z up.
#
# Trees and shrubs stand at the origin. A facet is one triangle that represents several leaves; a
# scanner's beam can pass between facets.

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
    # Leaves are in flat sprays at the ends of branches, of about a metre in large trees too.
    spray = min(0.28 * half.mean(), log_uniform(rng, 0.4, 1.1))
    flatness = rng.uniform(0.2, 0.6)
    num_clumps = int(np.clip(rng.uniform(0.08, 0.3) * np.prod(half / spray) / flatness, 12, 200))
    inside = rng.normal(size=(num_clumps, 3))
    inside *= rng.random((num_clumps, 1)) ** 0.4 / np.linalg.norm(inside, axis=1, keepdims=True)
    clump_size = spray * rng.uniform(0.6, 1.4, (num_clumps, 1)) * [1, 1, flatness]
    centres = middle + inside * (half - 0.5 * clump_size)
    thick = height * rng.uniform(0.006, 0.012)
    top = middle + np.array([0, 0, 0.4 * half[2]])
    trunk = sweep(np.linspace([0, 0, -0.5], top, 6), np.linspace(thick, 0.3 * thick, 6), circle(8))
    starts = rng.uniform(0.4, 0.9, num_clumps) * np.minimum(1, centres[:, 2] / top[2])
    wood = [trunk, branches(starts[:, None] * top, centres, max(0.3 * thick, 0.02))]
    leaf = rng.uniform(0.22, 0.34)
    # Leaf area index (leaf area per ground area) of 3 to 7, in facets of about 0.2 leaf^2.
    num_leaves = int(foliage * rng.uniform(3, 7) * np.pi * half[0] ** 2 / (0.2 * leaf**2))
    num_scattered = int(rng.uniform(0.02, 0.3) * num_leaves)
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
    line = np.linspace([0, 0, -0.5], [0, 0, height], 6)
    trunk = sweep(line, np.linspace(thick, 0.02, 6), circle(8))
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
