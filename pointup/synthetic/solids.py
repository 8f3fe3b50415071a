"""Procedural bodies: with sharp edges, curved, thin, and with sides close together."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import numpy as np
from scipy.spatial import ConvexHull

from pointup.synthetic.fields import (
    displace,
    isosurface,
    log_uniform,
    rotation,
    round_cones,
    smooth_minimum,
    waves,
)
from pointup.synthetic.tessellation import (
    cells,
    circle,
    curve,
    cut,
    extrude,
    grid,
    hull,
    outwards,
    refine,
    revolve,
    sphere,
    sweep,
    union,
)

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


def furniture(rng: np.random.Generator) -> np.ndarray:
    """A table, chair, shelf, crate or heat sink: thin walls at right angles."""
    size = rng.uniform([0.6, 0.4, 0.4], [1.6, 1.0, 1.4])
    make = (table, table, shelf, crate, heat_sink)[rng.integers(5)]
    return make(rng, size, rng.uniform(0.03, 0.12))


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
    edges = [radii, np.append(sectors, 2 * np.pi), levels]
    r, angle, z = np.moveaxis(refine(cells(occupied, edges, wrap_axis=1), 0.15), -1, 0)
    return np.stack([r * np.cos(angle), r * np.sin(angle), z], axis=-1)


Bone = tuple[np.ndarray, np.ndarray, float, float]


def superquadric(rng: np.random.Generator) -> np.ndarray:
    """A superquadric (Barr, 1981): between ball, cushion, cylinder, box and octahedron."""
    e, f = log_uniform(rng, 0.25, 2.2, 2)
    directions = sphere(0.05)
    x, y, z = np.abs(np.moveaxis(directions, -1, 0)) + 1e-9
    size = ((x ** (2 / f) + y ** (2 / f)) ** (f / e) + z ** (2 / e)) ** (e / 2)
    return directions / size[..., None] * rng.uniform(0.35, 1, 3)


def blob(rng: np.random.Generator) -> np.ndarray:
    """A star-shaped body with bumps of four sizes."""
    directions = sphere(0.07)
    height = np.zeros(directions.shape[:2])
    for frequency, strength in ((1.0, 0.35), (2.5, 0.2), (6.0, 0.06), (14.0, 0.015)):
        height += strength * rng.uniform(0, 1.3) * waves(rng, frequency)(directions)
    return directions * np.exp(height)[..., None]


def ring(rng: np.random.Generator) -> np.ndarray:
    """A torus or a torus knot with a round, flat or square cross-section."""
    winding, turns = ((1, 0), (1, 0), (2, 3), (3, 2), (2, 5), (1, 3), (1, 5))[rng.integers(7)]
    angle = np.linspace(0, 2 * np.pi, 160, endpoint=False)
    wobble = rng.uniform(0.15, 0.4)
    radius = 1 + wobble * np.cos(turns * angle) * (turns > 0)
    height = wobble * rng.uniform(0.8, 2) * np.sin(turns * angle) * (turns > 0)
    x, y = radius * np.cos(winding * angle), radius * np.sin(winding * angle)
    centres = np.stack([x, y, height], axis=1)
    thickness = 0.9 * min(clearance(centres, closed=True), log_uniform(rng, 0.06, 0.5))
    thickness = thickness * (1 + rng.uniform(0, 0.3) * np.cos(rng.integers(1, 9) * angle))
    return sweep(centres, thickness, section(rng), closed=True)


def section(rng: np.random.Generator) -> np.ndarray:
    """The cross-section (20, 2) of a tube: round to square, isotropic to flat."""
    outline = circle(20)
    power = rng.choice([2, 2, 2, 4, 10])
    outline = outline / (np.abs(outline) ** power).sum(axis=1, keepdims=True) ** (1 / power)
    return outline * [1, rng.choice([1, 1, rng.uniform(0.2, 1)])]


def clearance(centres: np.ndarray, closed: bool = False) -> float:
    """Largest radius at which a tube along centres (N, 3) does not touch itself."""
    step = np.linalg.norm(np.diff(centres, axis=0), axis=1)
    position = np.concatenate([[0], np.cumsum(step)])
    apart = np.abs(position[:, None] - position)
    if closed:
        total = position[-1] + np.linalg.norm(centres[0] - centres[-1])
        apart = np.minimum(apart, total - apart)
    gap = np.linalg.norm(centres[:, None] - centres, axis=2)
    # On a circle the arc between two points is at most pi / 2 times their distance. A longer arc
    # means that the curve returns to the same place.
    return float(0.5 * gap[apart > 1.8 * gap].min(initial=1.0))


def tubes(rng: np.random.Generator) -> np.ndarray:
    """One thick curved tube, or two or three thinner ones, like worms, wires or handles."""
    parts = []
    num_tubes = rng.choice([1, 1, 1, 2, 3])
    for _ in range(num_tubes):
        closed = bool(rng.random() < 0.3)
        steps = rng.normal(size=(rng.integers(4, 7), 3))
        points = np.cumsum(steps / np.linalg.norm(steps, axis=1, keepdims=True), axis=0) * 0.6
        centres = curve(points - points.mean(axis=0), 110, closed)
        thickest = min(clearance(centres, closed), log_uniform(rng, 0.06, 0.35) / num_tubes**0.5)
        along = np.linspace(0, 2 * np.pi, len(centres), endpoint=False)
        waist = rng.uniform(0, 0.5) * (0.5 + 0.5 * np.cos(along * rng.integers(1, 5)))
        radius = np.maximum(thickest * (1 - waist), 0.025)
        parts.append(sweep(centres, radius, section(rng), closed))
    return union(parts, 0.1) if num_tubes > 1 else parts[0]


def creature(rng: np.random.Generator) -> np.ndarray:
    """An animal or a human figure: a symmetric body with limbs, neck, head, ears and tail.

    The spine is along x from rear to front; the left side is y > 0. A figure is an animal that
    stands upright: its legs continue the spine beyond the rear.
    """
    skeleton: list[Bone] = []
    figure = rng.random() < 0.35
    length, girth = rng.uniform(0.7, 1.4), rng.uniform(0.14, 0.32)
    rear = np.array([-length / 2, 0, 0])
    spine = girth * rng.uniform(0.7, 1.2, 4)
    front = grow(rng, skeleton, rear, [1, 0, 0], length, spine, 0.12)

    limb, thin = rng.uniform(0.4, 1.1), girth * rng.uniform(0.25, 0.5)
    thickness = thin * np.array([1.5, 1, 0.8, 1])
    leg, arm = (
        ([-1, 0.1, 0], [-1, rng.uniform(0.2, 3), rng.normal()]) if figure else ([0, 0.1, -1],) * 2
    )
    for joint, heading in ((rear, leg), (front, arm)):
        start = joint + girth * np.array([0, 0.7, 0 if figure else -0.3])
        end = grow(rng, skeleton, start, heading, limb, thickness, 0.2, paired=True)
        toes = [0.1, 0.1, 1] if figure else [1, 0.1, -0.2]
        grow(rng, skeleton, end, toes, 2 * thin, thin * np.array([1, 0.6]), 0.1, paired=True)

    neck = girth * rng.uniform(0.35, 0.7)
    upwards = [1, 0, 0 if figure else rng.uniform(0, 2)]
    reach = rng.uniform(0.15, 0.35 if figure else 0.7)
    head = grow(rng, skeleton, front, upwards, reach, neck * np.array([1.3, 1, 1]), 0.2)
    skull = neck * rng.uniform(1.1, 1.6)
    snout = [0.3, 0, 1] if figure else [1, 0, rng.uniform(-0.8, 0.3)]
    jaw = skull * rng.uniform(0.3, 0.8 if figure else 2.2)
    grow(rng, skeleton, head, snout, jaw, skull * np.array([1, 0.6, 0.35]), 0.1)
    if rng.random() < 0.7:
        ear = skull * rng.uniform(0.15, 0.4) * np.array([1, 1, 0.4])
        root = head + skull * np.array([0, 0.6, 0.6])
        size = skull * rng.uniform(0.7, 3)
        grow(rng, skeleton, root, [-0.3, 0.5, 1], size, ear, 0.2, paired=True)
    if rng.random() < 0.7 and not figure:
        tail = np.maximum(girth * rng.uniform(0.15, 0.4) * np.array([1, 0.8, 0.6, 0.3]), 0.02)
        grow(rng, skeleton, rear, [-1, 0, rng.uniform(-1, 1)], rng.uniform(0.3, 1.2), tail, 0.4)
    return skin(rng, skeleton)


def grow(
    rng: np.random.Generator,
    skeleton: list[Bone],
    start: np.ndarray,
    heading: list[float],
    length: float,
    radii: np.ndarray,
    wander: float,
    paired: bool = False,
) -> np.ndarray:
    """Add a chain of bones to the skeleton, and its mirror image if `paired`; returns its end (3,).

    The chain has one bone fewer than `radii`. `wander` scales the random change of each bone's
    direction from `heading`.
    """
    point, mirror = start, np.array([1, -1, 1])
    for thick, thin in pairwise(radii):
        step = np.array(heading) + wander * rng.normal(size=3) * [1, paired, 1]
        end = point + step / np.linalg.norm(step) * length / (len(radii) - 1)
        skeleton.append((point, end, thick, thin))
        if paired:
            skeleton.append((point * mirror, end * mirror, thick, thin))
        point = end
    return point


def branching(rng: np.random.Generator) -> np.ndarray:
    """A stem that forks repeatedly, like a hand, a coral or a candlestick."""
    skeleton: list[Bone] = []
    tips = [(np.zeros(3), np.array([0, 0, 1.0]), rng.uniform(0.12, 0.25))]
    for level in range(rng.integers(2, 5)):
        grown = []
        for point, heading, radius in tips:
            forks = rng.integers(2, 6) if level == 1 else rng.integers(1, 3)
            for _ in range(forks if len(tips) < 10 else 1):
                step = heading + rng.normal(size=3) * (0.45 if level else 0.1)
                step = step / np.linalg.norm(step)
                end = point + step * rng.uniform(0.3, 0.6)
                tip = max(radius * rng.uniform(0.6, 0.95), 0.035)
                skeleton.append((point, end, radius, tip))
                grown.append((end, step, tip))
        tips = grown
    return skin(rng, skeleton)


def skin(rng: np.random.Generator, skeleton: list[Bone]) -> np.ndarray:
    """The surface of a skeleton: the smooth union of its bones, in half of the draws roughened."""
    starts, ends, first, last = map(np.array, zip(*skeleton, strict=True))
    size = np.ptp(np.concatenate([starts, ends]), axis=0).max()
    radii = np.stack([first, last], axis=1)
    triangles = round_cones(starts, ends, radii, rng.uniform(0.02, 0.1), size / 60)
    if rng.random() < 0.5:
        frequency, strength = log_uniform(rng, 8, 25), size * rng.uniform(0, 0.006)
        triangles = displace(triangles, rng, frequency, strength)
    return triangles


def metaballs(rng: np.random.Generator) -> np.ndarray:
    """A smooth union of ellipsoids and rounded boxes, some of them subtracted from the others."""
    num_parts = rng.integers(3, 8)
    centres = np.cumsum(rng.normal(size=(num_parts, 3)) * 0.25, axis=0)
    turns = [rotation(rng) for _ in range(num_parts)]
    sizes = rng.uniform(0.08, 0.4, (num_parts, 3))
    round_ones, carved = rng.random(num_parts) < 0.5, rng.random(num_parts) < 0.25
    blend, edge = log_uniform(rng, 0.03, 0.35), rng.uniform(0.04, 0.12)

    def field(points: np.ndarray) -> np.ndarray:
        value = np.full(len(points), 1.0)
        for i in range(num_parts):
            local = (points - centres[i]) @ turns[i]
            if round_ones[i]:
                distance = (np.linalg.norm(local / sizes[i], axis=1) - 1) * sizes[i].min()
            else:
                beyond = np.abs(local) - sizes[i]
                distance = np.linalg.norm(beyond.clip(0), axis=1)
                distance += beyond.max(axis=1).clip(max=0) - edge
            if carved[i] and i > 1:
                value = -smooth_minimum(-value, distance, blend / 2)
            else:
                value = smooth_minimum(value, distance, blend)
        return value

    reach = np.linalg.norm(sizes, axis=1)[:, None] + edge + blend
    return isosurface(field, (centres - reach).min(axis=0), (centres + reach).max(axis=0), 0.05)


def vase(rng: np.random.Generator) -> np.ndarray:
    """Bodies of revolution: vases, thin-walled cups, bottles, stepped shafts, bells."""
    if rng.random() < 0.4:
        num_steps = rng.integers(2, 6)
        radii = np.repeat(log_uniform(rng, 0.12, 0.7, num_steps), 2)
        steps = np.concatenate([[0], np.cumsum(log_uniform(rng, 0.06, 0.6, num_steps))])
        heights = np.repeat(steps, 2)[1:-1]
    else:
        heights = np.linspace(0, 1, 60) * rng.uniform(0.7, 1.8)
        radii = curve(rng.uniform(0.15, 0.6, (rng.integers(4, 7), 1)), 60)[:, 0].clip(0.05)
    outside = np.stack([radii, heights], axis=1)
    bore = rng.uniform(0.02, 0.1)
    if rng.random() < 0.6 and radii.min() > bore + 0.03:
        inside = outside[::-1] - [bore, 0]
        if rng.random() < 0.5:
            profile = np.concatenate([outside, inside, outside[:1]])
        else:
            inside = inside[inside[:, 1] > bore]
            floor = [[inside[-1, 0], bore], [0, bore]]
            profile = np.concatenate([[[0, 0]], outside, inside, floor])
    else:
        profile = np.concatenate([[[0, heights[0]]], outside, [[0, heights[-1]]]])
    return outwards(revolve(profile, 64))


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
        width = v * rng.uniform(0.2, 1) * (1.2 - u * u)
        height = rng.uniform(-1, 1) * u * v + rng.uniform(-0.5, 0.5) * u * u
        return np.stack([u, width, height], axis=-1)
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


# Surfaces whose sides are about as far apart as the points of a sparse sampling.
#
# Parallel sheets, solids with slots and notches, and rods side by side are rare among other shapes,
# so `pointup prepare default --close-sides` makes more of them.


def parallel_sheets(rng: np.random.Generator) -> np.ndarray:
    """Two or three open sheets, one above the other; some gaps widen to one side."""
    lowest = sheet(rng)
    if rng.random() < 0.5:
        lowest = np.concatenate([lowest[..., :2], np.zeros_like(lowest[..., :1])], axis=-1)
    widening = rng.choice([0, 0, rng.uniform(0, 3)]) * np.linspace(0, 1, len(lowest))
    gap = log_uniform(rng, 0.012, 0.12) * (1 + widening)[:, None, None] * grid_normals(lowest)
    return np.concatenate([grid(lowest + level * gap) for level in range(rng.choice([2, 2, 3]))])


def slotted_block(rng: np.random.Generator) -> np.ndarray:
    """A block with one to four narrow slots between prongs, like a fork or a comb."""
    num_slots = rng.integers(1, 5)
    lengths = np.empty(2 * num_slots + 1)
    lengths[::2] = log_uniform(rng, 0.1, 0.6, num_slots + 1)
    lengths[1::2] = log_uniform(rng, 0.02, 0.25, num_slots)
    depths = np.concatenate([[log_uniform(rng, 0.1, 0.5)], log_uniform(rng, 0.1, 0.6, 3)])
    height = log_uniform(rng, 0.08, 0.8)
    occupied = np.ones((len(lengths), len(depths), 1), dtype=bool)
    for slot in range(num_slots):
        occupied[2 * slot + 1, rng.integers(1, len(depths)) :] = False
    edges = [np.concatenate([[0], np.cumsum(steps)]) for steps in (lengths, depths)]
    return cells(occupied, [*edges, np.array([0, height])])


def notched_prism(rng: np.random.Generator) -> np.ndarray:
    """A prism with one to three notches in the form of a V."""
    num_notches = rng.integers(1, 4)
    width = rng.uniform(0.5, 1) * num_notches
    outline = [(0.0, -1.0), (width, -1.0), (width, 0.0)]
    for notch in range(num_notches)[::-1]:
        half, deep = log_uniform(rng, 0.03, 0.2), rng.uniform(0.2, 0.85)
        middle = (notch + rng.uniform(0.4, 0.6)) * width / num_notches
        outline += [(middle + half, 0.0), (middle + rng.uniform(-1, 1) * half, -deep)]
        outline += [(middle - half, 0.0)]
    loop = np.array([*outline, (0.0, 0.0)]) - [width / 2, -0.5]
    height = log_uniform(rng, 0.1, 1)
    return extrude([loop], np.array([-height / 2, height / 2]), np.ones(2), spacing=0.02)


def side_by_side(rng: np.random.Generator) -> np.ndarray:
    """Two to five bent rods, side by side without contact, like fingers, cables or tines."""
    along = np.linspace(0, 1, 24)
    bend = rng.uniform(-0.3, 0.3, (2, 1)) * np.square(along)
    rods, position = [], 0.0
    for _ in range(rng.integers(2, 6)):
        radius = log_uniform(rng, 0.04, 0.15)
        length = rng.uniform(0.7, 1.1)
        radii = radius * np.sqrt(np.clip(1 - ((along - 0.5) * 2) ** 8, 0.05, 1))
        centres = np.stack([position + radius + bend[0], bend[1], length * along], axis=1)
        rods.append(sweep(centres, radii, circle(16)))
        position += 2 * radius + log_uniform(rng, 0.015, 0.15)
    return np.concatenate(rods)


CLOSE_SIDES = {parallel_sheets: 2, slotted_block: 2, notched_prism: 1, side_by_side: 1}
"""Families and their weights, see `pointup.synthetic.shapes.FAMILIES`."""
