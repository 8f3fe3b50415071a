"""Random numbers, rotations and smooth fields, for the generators of this package."""

from __future__ import annotations

from typing import Any

import numpy as np

from pointup.synthetic.implicit_surfaces import Field


def log_uniform(rng: np.random.Generator, low: float, high: float, size: Any = None) -> Any:
    """Random numbers between `low` and `high`, uniform in the logarithm."""
    return np.exp(rng.uniform(np.log(low), np.log(high), size))


def waves(
    rng: np.random.Generator, frequency: float, num_waves: int = 12, dimension: int = 3
) -> Field:
    """A smooth random field of unit variance; `frequency` is in radians per unit of length."""
    directions = rng.normal(size=(dimension, num_waves)) * frequency
    phases = rng.uniform(0, 2 * np.pi, num_waves)
    scale = (2 / num_waves) ** 0.5
    return lambda points: scale * np.cos(points @ directions + phases).sum(axis=-1)


def rotation(rng: np.random.Generator) -> np.ndarray:
    """A uniformly random rotation matrix (3, 3)."""
    q, r = np.linalg.qr(rng.normal(size=(3, 3)))
    q = q * np.sign(np.diag(r))
    return q if np.linalg.det(q) > 0 else q[:, [1, 0, 2]]


def displace(
    points: np.ndarray, rng: np.random.Generator, frequency: float, strength: float
) -> np.ndarray:
    """Displace points (..., 3) by a smooth random vector field, so that equal points stay equal."""
    fields = [waves(rng, frequency) for _ in range(3)]
    return points + strength * np.stack([field(points) for field in fields], axis=-1)
