"""Random crops, similarity transforms and sensor noise for training pairs."""

from __future__ import annotations

import numpy as np

SCALES = (0.8, 1.2)
JITTER = 0.01
NUM_PROBES = 8
NUM_CENTRES = 8


def crop_pair(
    clouds: dict[str, np.ndarray], max_tokens: int, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Crop a pair to the `max_tokens` source and target points nearest to a random source point.

    A centre around which there are points of one cloud only, as at the border of one of two
    surveys, is drawn again, up to 8 times. If the source is empty, the centre is a random target
    point. `target_normals` are cropped with the target, and `resample` to the ball of the kept
    points. A pair within the budget is returned unchanged.
    """
    source, target = clouds["source"], clouds["target"]
    if len(source) + len(target) <= max_tokens:
        return clouds
    centres = source if len(source) else target
    for _ in range(NUM_CENTRES):
        centre = centres[rng.integers(len(centres))]
        squared = [_squared_distances(points, centre) for points in (source, target)]
        both = np.concatenate(squared)
        nearest = np.argpartition(both, max_tokens - 1)[:max_tokens]
        inside = np.zeros(len(both), bool)
        inside[nearest] = True
        if inside[: len(source)].any() and inside[len(source) :].any():
            break
    cropped = {"source": source[inside[: len(source)]], "target": target[inside[len(source) :]]}
    if "target_normals" in clouds:
        cropped["target_normals"] = clouds["target_normals"][inside[len(source) :]]
    if "resample" in clouds:
        within = _squared_distances(clouds["resample"], centre) <= both[nearest].max()
        cropped["resample"] = clouds["resample"][within]
    return cropped


def augment_pair(
    clouds: dict[str, np.ndarray], vertical: bool, rng: np.random.Generator, noise: float = 0.0
) -> dict[str, np.ndarray]:
    """Rotate, mirror and scale a pair about the mean of its source, and jitter the source.

    `clouds` maps `source`, `target` and optional columns to (N, 3) float32. `target_normals` are
    directions: they are rotated and mirrored only. The jitter is Gaussian noise with a standard
    deviation of 0.01 of the source's point spacing, or drawn evenly from 0.01 to `noise` if that is
    larger.
    """
    rotation = random_rotation(rng, vertical)
    scale = rng.uniform(*SCALES)
    source = clouds["source"]
    centre = source.mean(axis=0, dtype=np.float64) if len(source) else np.zeros(3)
    turn = rotation.T.astype(np.float32)
    similarity = (scale * rotation.T).astype(np.float32)
    shift = (centre - centre @ (scale * rotation.T)).astype(np.float32)
    moved = {
        name: points @ turn if name == "target_normals" else points @ similarity + shift
        for name, points in clouds.items()
    }
    spacing = scale * estimate_spacing(source, rng)
    share = rng.uniform(JITTER, noise) if noise > JITTER else JITTER
    sigma = np.float32(share * spacing)
    moved["source"] += sigma * rng.standard_normal(source.shape, dtype=np.float32)
    return moved


def random_rotation(rng: np.random.Generator, vertical: bool) -> np.ndarray:
    """A uniformly random orthogonal matrix (3, 3), with a reflection in half of the draws.

    With `vertical` the z axis is not changed, so that up stays up in surveys.
    """
    if vertical:
        angle = rng.uniform(0, 2 * np.pi)
        cos, sin = np.cos(angle), np.sin(angle)
        rotation = np.array([[cos, -sin, 0.0], [sin, cos, 0.0], [0.0, 0.0, 1.0]])
    else:
        # Q of the QR decomposition of a Gaussian matrix is uniform if R has a positive diagonal.
        q, r = np.linalg.qr(rng.standard_normal((3, 3)))
        rotation = q * np.sign(np.diag(r))
        rotation[:, 0] *= np.sign(np.linalg.det(rotation))
    if rng.random() < 0.5:
        rotation[:, 0] *= -1
    return rotation


def estimate_spacing(points: np.ndarray, rng: np.random.Generator) -> float:
    """Median nearest-neighbour distance of `NUM_PROBES` random points; 0 for fewer than two."""
    if len(points) < 2:
        return 0.0
    axes = np.ascontiguousarray(points.T)
    nearest = []
    for probe in rng.integers(len(points), size=NUM_PROBES):
        offset = axes - axes[:, probe, None]
        offset *= offset
        squared = offset.sum(axis=0)
        squared[probe] = np.inf
        nearest.append(squared.min())
    return float(np.sqrt(np.median(nearest)))


def _squared_distances(points: np.ndarray, centre: np.ndarray) -> np.ndarray:
    offset = points - centre
    return np.einsum("ij,ij->i", offset, offset)
