"""Reads the samples of a pair dataset for training, by (epoch, index), and augments them."""

from __future__ import annotations

import operator
import time

import numpy as np
import torch
from torch_geometric.data import Data

from pointup.datasets.packing import checked_integer, cropped_sizes
from pointup.datasets.samples import JoinedSamples, Samples, UnreadableSample
from pointup.geometry.grids import codes_in_cube


class PairDataset(torch.utils.data.Dataset[Data]):
    """The samples of a pair dataset, by key (epoch, index), or by index for epoch 0.

    The key of repetition k of a sample in an epoch is (epoch, index, k): each repetition gets its
    own augmentation. Negative indices count from the end. A sample is a PyG `Data` with `pos`
    (N, 3) and `target` (M, 3) float32, `name`, `index`, `vertical`, and `target_normals` and
    `resample` if the pair has them. Its tensors are writable. The points of large clouds are in
    spatial order, which makes neighbour searches faster. `core` is `Samples.core`.
    `seconds` holds the durations of reading, augmenting and ordering. A sample that can't be read
    has no points and has `fault`, the reason; `collate` leaves it out.

    With `max_tokens`, a larger pair is cropped to the `max_tokens` points around a random source
    point. `noise`, in spacings of the source, is the largest that a source gets, with or without
    augmentation. The random numbers depend only on (seed, epoch, index), not on the worker, the
    process or a resume.

    Attributes:
        full_sizes: (n,) int32, tokens of each sample before cropping.
        num_source: (n,) int32, source points of each sample before cropping.
        names: (n,) names of the samples, looked up when they are asked for.
    """

    def __init__(
        self,
        samples: Samples | JoinedSamples,
        seed: int = 0,
        augment: bool = False,
        noise: float = 0.0,
        max_tokens: int | None = None,
    ) -> None:
        if max_tokens is not None:
            max_tokens = checked_integer("max_tokens", max_tokens, 1)
        self.samples = samples
        self.seed = seed
        self.augment = augment
        self.noise = noise
        # Together 8 bytes a sample: all that a process holds of a dataset beside its plan.
        self.num_source = self.samples.array("num_source")
        self.full_sizes = self.num_source + self.samples.array("num_target")
        self.max_tokens = max_tokens
        self.names = self.samples.names

    @property
    def sizes(self) -> np.ndarray:
        """Tokens (n,) of each sample after cropping: source and target points together."""
        if self.max_tokens is None:
            return self.full_sizes
        return cropped_sizes(self.full_sizes, self.max_tokens)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, key: tuple[int, ...] | int) -> Data:
        began = time.perf_counter()
        epoch, index, *repetition = key if isinstance(key, tuple) else (0, key)
        index = operator.index(index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        index %= len(self)
        name, vertical = self.names[index], self.samples.is_vertical(index)
        try:
            clouds = self.samples.points(index)
        except UnreadableSample as error:
            return Data(name=name, index=index, fault=str(error))
        is_read = time.perf_counter()
        core = None
        if not self.augment and self.max_tokens is None:
            core = self.samples.core(index, clouds)
        rng = np.random.default_rng([self.seed, epoch, index, *repetition])
        if self.max_tokens is not None:
            clouds = crop_pair(clouds, self.max_tokens, rng)
        if self.augment:
            clouds = augment_pair(clouds, vertical, rng, self.noise)
        elif self.noise:
            spacing = estimate_spacing(clouds["source"], rng)
            clouds = {**clouds, "source": with_noise(clouds["source"], spacing, self.noise, rng)}
        is_augmented = time.perf_counter()
        clouds = in_spatial_order(clouds)
        tensors = {name: torch.from_numpy(points) for name, points in clouds.items()}
        return Data(
            pos=tensors.pop("source"),
            name=name,
            index=index,
            vertical=vertical,
            core=core,
            seconds={
                "reading": is_read - began,
                "augmenting": is_augmented - is_read,
                "ordering": time.perf_counter() - is_augmented,
            },
            **tensors,
        )


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
    directions: they are rotated and mirrored only. `with_noise` is the jitter.
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
    return {**moved, "source": with_noise(moved["source"], spacing, noise, rng)}


def with_noise(
    points: np.ndarray, spacing: float, noise: float, rng: np.random.Generator
) -> np.ndarray:
    """Points (N, 3) with Gaussian noise of a standard deviation between `JITTER` and `noise` times
    their spacing, drawn evenly, or `JITTER` times, if that is larger."""
    share = rng.uniform(JITTER, noise) if noise > JITTER else JITTER
    return points + np.float32(share * spacing) * rng.standard_normal(
        points.shape, dtype=np.float32
    )


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


SORTED_FROM = 16_384
"""Smallest cloud that is sorted. Smaller clouds fit into a cache, so that their order does not
matter."""

_BITS = 16


def in_spatial_order(clouds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Sort each cloud of a pair that has at least `SORTED_FROM` points by `spatial_order`.

    `target_normals` get the order of `target`.
    """
    ordered = {}
    for name, points in clouds.items():
        positions = clouds["target"] if name == "target_normals" else points
        is_large = len(positions) >= SORTED_FROM
        ordered[name] = points[spatial_order(positions)] if is_large else points
    return ordered


def spatial_order(points: np.ndarray) -> np.ndarray:
    """Indices (N,) that sort points (N, 3) along a Morton curve through their bounding cube.

    Morton 1966, "A computer oriented geodetic data base". The curve has 2**48 cells; points of one
    cell keep their order. If any coordinate is not finite, all points keep their order.
    """
    if not len(points) or not np.isfinite(points).all():
        return np.arange(len(points))
    return np.argsort(codes_in_cube(points, _BITS), kind="stable")
