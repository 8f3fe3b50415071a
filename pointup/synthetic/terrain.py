"""The ground of landscapes: slopes, bumps, roads, ditches, terraces. Metres, z up."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pointup.synthetic.implicit_surfaces import Field
from pointup.synthetic.randomness import log_uniform, waves
from pointup.synthetic.tessellation import grid


def ground(rng: np.random.Generator, steep: bool = False) -> Field:
    """A random height field: maps places (..., 2) to heights (...).

    A `steep` one has a slope of 20 to 45 degrees.
    """
    roughness = log_uniform(rng, 0.002, 0.015)
    lengths = (60.0, 25.0, 10.0, 4.0, 1.5)
    bumps = [(roughness * length, waves(rng, 4 / length, dimension=2)) for length in lengths]
    slope = rng.normal(size=2) * rng.choice([0.02, 0.1, 0.25])
    if steep:
        slope *= np.tan(np.radians(rng.uniform(20, 45))) / np.linalg.norm(slope)

    def hills(places: np.ndarray) -> np.ndarray:
        return places @ slope + sum(strength * wave(places) for strength, wave in bumps)

    features = [road, ditch, terrace]
    height: Field = hills
    for _ in range(rng.choice([0, 1, 1, 2])):
        height = features[rng.integers(3)](rng, height)
    return height


def across(rng: np.random.Generator) -> Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """A random line: maps places (..., 2) to signed distances (...) and foot points (..., 2)."""
    angle, offset = rng.uniform(0, 2 * np.pi), rng.uniform(-6, 6)
    normal = np.array([np.cos(angle), np.sin(angle)])

    def measure(places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        distance = places @ normal - offset
        return distance, places - distance[..., None] * normal

    return measure


def road(rng: np.random.Generator, height: Field) -> Field:
    """The ground with a road that is level across its width, on a bank or in a cutting."""
    line, half_width = across(rng), rng.uniform(1.2, 4)
    rise, shoulder = rng.normal() * 0.3, rng.uniform(0.3, 2)

    def with_road(places: np.ndarray) -> np.ndarray:
        distance, foot = line(places)
        share = ((half_width + shoulder - np.abs(distance)) / shoulder).clip(0, 1)
        share = share * share * (3 - 2 * share)
        return height(places) * (1 - share) + (height(foot) + rise) * share

    return with_road


def ditch(rng: np.random.Generator, height: Field) -> Field:
    """The ground with a flat-bottomed ditch or a dyke."""
    line, half_width, side = across(rng), rng.uniform(0.2, 1.5), rng.uniform(0.3, 1.5)
    depth = rng.uniform(0.3, 1.5) * rng.choice([1, 1, -1])

    def with_ditch(places: np.ndarray) -> np.ndarray:
        distance = np.abs(line(places)[0])
        return height(places) - depth * ((half_width + side - distance) / side).clip(0, 1)

    return with_ditch


def terrace(rng: np.random.Generator, height: Field) -> Field:
    """The ground with a step, like a retaining wall, a quay or a bank."""
    line, rise, run = across(rng), rng.uniform(0.4, 2.5), log_uniform(rng, 0.1, 2)

    def with_step(places: np.ndarray) -> np.ndarray:
        return height(places) + rise * (line(places)[0] / run).clip(0, 1)

    return with_step


def terrain(height: Field, width: float, cell: float = 0.4) -> np.ndarray:
    """Triangles of the ground over a square of `width` centred on the origin."""
    axis = np.linspace(-width / 2, width / 2, round(width / cell) + 1)
    x, y = np.meshgrid(axis, axis, indexing="xy")
    places = np.stack([x, y], axis=-1)
    return grid(np.concatenate([places, height(places)[..., None]], axis=-1))
