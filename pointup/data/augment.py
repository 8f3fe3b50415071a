"""Random similarity transforms and sensor noise for pairs, all drawn from one generator."""

from __future__ import annotations

import numpy as np

SCALES = (0.8, 1.2)
JITTER = 0.01


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


def estimate_spacing(points: np.ndarray, rng: np.random.Generator, num_probes: int = 16) -> float:
    """Median distance of a few random points to their nearest other; 0 for fewer than two."""
    if len(points) < 2:
        return 0.0
    probes = rng.integers(len(points), size=num_probes)
    distances = []
    for probe in probes:
        offset = points - points[probe]
        squared = np.einsum("ij,ij->i", offset, offset)
        squared[probe] = np.inf
        distances.append(squared.min())
    return float(np.sqrt(np.median(distances)))


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
    centre = source.mean(axis=0, dtype=np.float64).astype(np.float32) if len(source) else 0
    similarity = (scale * rotation).T.astype(np.float32)
    turned = {
        name: points @ rotation.T.astype(np.float32)
        if name == "target_normals"
        else (points - centre) @ similarity + centre
        for name, points in clouds.items()
    }
    sigma = np.float32(JITTER * scale * estimate_spacing(source, rng))
    turned["source"] += sigma * rng.standard_normal(source.shape, dtype=np.float32)
    return turned
