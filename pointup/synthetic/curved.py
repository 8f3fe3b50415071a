"""Smooth procedural bodies: balls, blobs, rings, tubes, vessels, animals."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from pointup.synthetic.implicit_surfaces import isosurface, round_cones, smooth_minimum
from pointup.synthetic.randomness import displace, log_uniform, rotation, waves
from pointup.synthetic.tessellation import (
    circle,
    curve,
    outwards,
    revolve,
    sphere,
    sweep,
    union,
)

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
    centres = np.stack(
        [radius * np.cos(winding * angle), radius * np.sin(winding * angle), height], axis=1
    )
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
        ear = skull * rng.uniform(0.15, 0.4)
        root = head + skull * np.array([0, 0.6, 0.6])
        size = skull * rng.uniform(0.7, 3)
        grow(
            rng, skeleton, root, [-0.3, 0.5, 1], size, ear * np.array([1, 1, 0.4]), 0.2, paired=True
        )
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
    triangles = round_cones(
        starts, ends, np.stack([first, last], axis=1), rng.uniform(0.02, 0.1), size / 60
    )
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
