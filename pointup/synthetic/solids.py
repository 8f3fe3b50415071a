"""Procedural bodies with sharp edges, like parts of machines, buildings and furniture."""

from __future__ import annotations

import numpy as np

from pointup.synthetic.randomness import log_uniform
from pointup.synthetic.tessellation import cells, circle, extrude, hull, refine

Loops = list[np.ndarray]


def polyhedron(rng: np.random.Generator) -> np.ndarray:
    """The convex hull of 5 to 40 random points, like a wedge, a gem or a rock."""
    points = rng.normal(size=(rng.choice([5, 6, 8, 12, 20, 40]), 3))
    if rng.random() < 0.6:
        points /= np.linalg.norm(points, axis=1, keepdims=True)
    return hull(points * rng.uniform(0.3, 1, 3))


# Outlines are centred on the origin, with a radius of about 1: the outer polygon, then the holes.


def disc(rng: np.random.Generator) -> Loops:
    """A regular polygon or a disc, some with a bore or a ring of bolt holes."""
    outer = circle(int(rng.choice([3, 4, 5, 6, 8, 48])))
    holes = []
    if len(outer) > 3 and rng.random() < 0.6:
        holes = [0.5 * place + 0.12 * circle(20) for place in circle(int(rng.choice([3, 4, 6])))]
    if rng.random() < 0.6:
        holes.append(rng.uniform(0.1, 0.32) * circle(28))
    return [outer, *holes]


def gear(rng: np.random.Generator) -> Loops:
    """A toothed wheel with a bore."""
    num_teeth, depth = rng.integers(6, 17), rng.uniform(0.1, 0.3)
    steps = np.array([0, 0.2, 0.35, 0.65, 0.8])
    radius = np.tile(np.array([1 - depth, 1 - depth, 1, 1, 1 - depth]), num_teeth)
    angle = (np.arange(num_teeth)[:, None] + steps).ravel() * (2 * np.pi / num_teeth)
    outer = radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    return [outer, rng.uniform(0.1, 0.5) * circle(32)]


def stairs(rng: np.random.Generator) -> Loops:
    """The side view of stairs."""
    num_steps = rng.integers(3, 7)
    treads = np.linspace(-1, 1, num_steps + 1).repeat(2)
    rises = np.linspace(-0.5, rng.uniform(0.3, 0.9), num_steps).repeat(2)
    bottom = [[1, -1], [-1, -1]]
    return [np.concatenate([np.stack([treads[1:-1], rises], axis=1), bottom])]


def profile(rng: np.random.Generator) -> Loops:
    """The cross-section of a steel beam: L, T, U, I or Z."""
    t = rng.uniform(0.08, 0.3)
    h = t / 2
    shapes = (
        [[-1, -1], [1, -1], [1, t - 1], [t - 1, t - 1], [t - 1, 1], [-1, 1]],
        [[-h, -1], [h, -1], [h, 1 - t], [1, 1 - t], [1, 1], [-1, 1], [-1, 1 - t], [-h, 1 - t]],
        [[-1, -1], [1, -1], [1, 1], [1 - t, 1], [1 - t, t - 1], [t - 1, t - 1], [t - 1, 1],
         [-1, 1]],
        [[-1, -1], [1, -1], [1, t - 1], [h, t - 1], [h, 1 - t], [1, 1 - t], [1, 1], [-1, 1],
         [-1, 1 - t], [-h, 1 - t], [-h, t - 1], [-1, t - 1]],
        [[0, -1], [1, -1], [1, t - 1], [t, t - 1], [t, 1], [-1, 1], [-1, 1 - t], [0, 1 - t]],
    )  # fmt: skip
    return [np.array(shapes[rng.integers(len(shapes))], dtype=float) * rng.uniform(0.5, 1, 2)]


def plate(rng: np.random.Generator) -> Loops:
    """A rectangle with a hole at each corner, some with a slot."""
    height = rng.uniform(0.4, 1)
    corners = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]]) * [1, height]
    places = corners - np.sign(corners) * 0.2
    holes = [place + rng.uniform(0.06, 0.12) * circle(20) for place in places]
    if rng.random() < 0.6:
        slot = circle(32) * 0.2 * height
        slot[:, 0] += np.sign(slot[:, 0]) * rng.uniform(0, 0.3)
        holes.append(slot)
    return [corners, *holes]


def star(rng: np.random.Generator) -> Loops:
    """A star of three to eight tips."""
    num_tips = int(rng.integers(3, 9))
    radius = np.where(np.arange(2 * num_tips) % 2, rng.uniform(0.3, 0.7), 1)
    return [circle(2 * num_tips) * radius[:, None]]


def jigsaw(rng: np.random.Generator) -> Loops:
    """A smooth irregular outline, some with a hole of the same form."""
    angle = np.linspace(0, 2 * np.pi, 90, endpoint=False)
    wave = np.arange(2, 7)
    bumps = np.cos(angle[:, None] * wave + rng.uniform(0, 2 * np.pi, 5))
    outer = circle(90) * np.exp(bumps @ (rng.normal(size=5) * 0.25 / wave))[:, None]
    return [outer, outer * rng.uniform(0.3, 0.6)] if rng.random() < 0.5 else [outer]


OUTLINES = (disc, gear, stairs, profile, plate, star, jigsaw)


def prism(rng: np.random.Generator) -> np.ndarray:
    """An extruded outline: plates, brackets, gears, stairs, beams, pyramids."""
    outline = OUTLINES[rng.integers(len(OUTLINES))](rng)
    height, taper = log_uniform(rng, 0.05, 2.5), rng.choice([1, 1, 1, rng.uniform(0.2, 1)])
    return extrude(outline, np.array([-height / 2, height / 2]), np.array([1, taper]))


def blocks(rng: np.random.Generator) -> np.ndarray:
    """A union of boxes minus other boxes, all on one rectilinear grid with some thin cells."""
    counts = rng.integers(3, 8, size=3)
    edges = [np.concatenate([[0], np.cumsum(log_uniform(rng, 0.05, 0.6, n))]) for n in counts]
    occupied = np.zeros(counts, dtype=bool)

    def box() -> tuple[slice, ...]:
        ends = [np.sort(rng.choice(n + 1, 2, replace=False)) for n in counts]
        return tuple(slice(a, b) for a, b in ends)

    occupied[box()] = True
    num_left, num_tries = rng.integers(2, 7), 0
    while num_left and num_tries < 50:
        num_tries += 1
        added = box()
        if occupied[added].any() and not occupied[added].all():
            occupied[added] = True
            num_left -= 1
    for _ in range(rng.integers(0, 3)):
        removed = occupied.copy()
        removed[box()] = False
        if removed.sum() > occupied.sum() / 2:
            occupied = removed
    return cells(occupied, edges)


def table(rng: np.random.Generator, size: np.ndarray, thin: float) -> np.ndarray:
    """A table, or a chair with a back."""
    seat = rng.uniform(0.4, 0.8) * size[2]
    chair = rng.random() < 0.6
    levels = np.array([0, seat, seat + thin, size[2] + thin])
    occupied = np.zeros((3, 3, 3 if chair else 2), dtype=bool)
    occupied[::2, ::2, 0] = True
    occupied[:, :, 1] = True
    if chair:
        occupied[0, :, 2] = [True, rng.random() < 0.7, True]
    sides = [np.array([0, thin, length - thin, length]) for length in size[:2]]
    return cells(occupied, [*sides, levels[: occupied.shape[2] + 1]])


def shelf(rng: np.random.Generator, size: np.ndarray, thin: float) -> np.ndarray:
    """A shelf: boards between two sides, with or without a back."""
    boards = np.linspace(0, size[2] - thin, rng.integers(2, 6))
    occupied = np.zeros((3, 2, 2 * len(boards) - 1), dtype=bool)
    occupied[::2] = True
    occupied[:, :, ::2] = True
    occupied[:, 1] |= rng.random() < 0.5
    sides = np.array([0, thin, size[0] - thin, size[0]])
    depth = np.array([0, size[1] - thin / 2, size[1]])
    return cells(occupied, [sides, depth, np.stack([boards, boards + thin], axis=1).ravel()])


def crate(rng: np.random.Generator, size: np.ndarray, thin: float) -> np.ndarray:
    """A box with compartments and without a lid."""
    walls = np.linspace(0, size[0] - thin, rng.integers(2, 5))
    occupied = np.ones((2 * len(walls) - 1, 3, 2), dtype=bool)
    occupied[1::2, 1, 1] = False
    depth = np.array([0, thin, size[1] - thin, size[1]])
    floor = np.array([0, thin, size[2]])
    return cells(occupied, [np.stack([walls, walls + thin], axis=1).ravel(), depth, floor])


def heat_sink(rng: np.random.Generator, size: np.ndarray, thin: float) -> np.ndarray:
    """A heat sink: narrow fins on a plate."""
    num_fins = rng.integers(4, 12)
    fins = np.linspace(0, size[0], num_fins)
    occupied = np.ones((2 * num_fins - 1, 1, 2), dtype=bool)
    occupied[1::2, :, 1] = False
    width = size[0] / num_fins * rng.uniform(0.2, 0.5)
    height = np.array([0, thin, size[2] * 0.7])
    edges = np.stack([fins, fins + width], axis=1).ravel()
    return cells(occupied, [edges, np.array([0, size[1]]), height])


FURNITURE = (table, table, shelf, crate, heat_sink)


def furniture(rng: np.random.Generator) -> np.ndarray:
    """A table, chair, shelf, crate or heat sink: thin walls at right angles."""
    size = rng.uniform([0.6, 0.4, 0.4], [1.6, 1.0, 1.4])
    return FURNITURE[rng.integers(len(FURNITURE))](rng, size, rng.uniform(0.03, 0.12))


def flange(rng: np.random.Generator) -> np.ndarray:
    """Blocks in cylindrical coordinates: flanges, hubs, pulleys, slotted rings, castle towers."""
    num_radii, num_levels = rng.integers(2, 5), rng.integers(1, 5)
    num_sectors = int(rng.choice([3, 4, 6, 8]))
    radii = np.concatenate([[0], np.cumsum(log_uniform(rng, 0.08, 0.5, num_radii))])
    radii[0] = rng.choice([1e-3, rng.uniform(0.05, 0.3)])
    radii[1:] += radii[0]
    levels = np.concatenate([[0], np.cumsum(log_uniform(rng, 0.06, 0.5, num_levels))])
    share = rng.uniform(0.25, 0.75)
    sectors = (np.arange(num_sectors)[:, None] + [0, share]).ravel() * (2 * np.pi / num_sectors)
    occupied = np.zeros((num_radii, 2 * num_sectors, num_levels), dtype=bool)
    for level in range(num_levels):
        occupied[: rng.integers(1, num_radii + 1), :, level] = True
    occupied[:, :, rng.integers(num_levels)] = True
    if rng.random() < 0.7:
        occupied[rng.integers(num_radii), ::2, rng.integers(num_levels)] = False
    if not occupied.any():
        occupied[:] = True
    edges = [radii, np.append(sectors, 2 * np.pi), levels]
    r, angle, z = np.moveaxis(refine(cells(occupied, edges, wrap_axis=1), 0.15), -1, 0)
    return np.stack([r * np.cos(angle), r * np.sin(angle), z], axis=-1)
