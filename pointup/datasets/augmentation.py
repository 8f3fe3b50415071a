"""Random crops, similarity transforms and sensor noise for pairs, all drawn from one generator."""

from __future__ import annotations

import numpy as np

SCALES = (0.8, 1.2)
JITTER = 0.01
NUM_PROBES = 8


def crop_pair(
    clouds: dict[str, np.ndarray], max_tokens: int, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """The `max_tokens` points of source and target nearest to a random point of the source.

    All clouds of the pair lose what is outside that ball; a pair that is small enough stays whole.
    """
    source, target = clouds["source"], clouds["target"]
    if len(source) + len(target) <= max_tokens:
        return clouds
    centres = source if len(source) else target
    centre = centres[rng.integers(len(centres))]
    squared = {name: _squared_distances(clouds[name], centre) for name in ("source", "target")}
    both = np.concatenate([squared["source"], squared["target"]])
    nearest = np.argpartition(both, max_tokens - 1)[:max_tokens]
    inside = np.zeros(len(both), bool)
    inside[nearest] = True
    cropped = {"source": source[inside[: len(source)]], "target": target[inside[len(source) :]]}
    if "target_normals" in clouds:
        cropped["target_normals"] = clouds["target_normals"][inside[len(source) :]]
    if "resample" in clouds:
        within = _squared_distances(clouds["resample"], centre) <= both[nearest].max()
        cropped["resample"] = clouds["resample"][within]
    return cropped


def augment_pair(
    clouds: dict[str, np.ndarray], vertical: bool, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Rotates, mirrors and scales a pair about the mean of its source, and jitters the source.

    `clouds` maps `source`, `target` and what else there is to (N, 3) float32; `target_normals` are
    directions and only turn. The jitter is Gaussian, of 0.01 of the source's own point spacing.
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
    sigma = np.float32(JITTER * scale * estimate_spacing(source, rng))
    moved["source"] += sigma * rng.standard_normal(source.shape, dtype=np.float32)
    return moved


def random_rotation(rng: np.random.Generator, vertical: bool) -> np.ndarray:
    """An orthogonal (3, 3) matrix, drawn uniformly, a mirror image half of the time.

    With `vertical` the z axis stays where it is: what is up in a survey stays up.
    """
    if vertical:
        angle = rng.uniform(0, 2 * np.pi)
        cos, sin = np.cos(angle), np.sin(angle)
        rotation = np.array([[cos, -sin, 0.0], [sin, cos, 0.0], [0.0, 0.0, 1.0]])
    else:
        # The QR decomposition of a Gaussian matrix is uniform once R has a positive diagonal.
        q, r = np.linalg.qr(rng.standard_normal((3, 3)))
        rotation = q * np.sign(np.diag(r))
        rotation[:, 0] *= np.sign(np.linalg.det(rotation))
    if rng.random() < 0.5:
        rotation[:, 0] *= -1
    return rotation


def estimate_spacing(points: np.ndarray, rng: np.random.Generator) -> float:
    """Median distance of a few random points to their nearest other; 0 for fewer than two."""
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
