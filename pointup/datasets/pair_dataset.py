"""Reads the samples of a pair dataset for training, by (epoch, index)."""

from __future__ import annotations

import operator
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch_geometric.data import Data

from pointup.datasets.augmentation import augment_pair, crop_pair
from pointup.datasets.checks import BadSample, find_bad_samples
from pointup.datasets.joined_samples import JoinedSamples
from pointup.datasets.locality import in_spatial_order
from pointup.datasets.opening import open_pairs, read_pair
from pointup.datasets.pair import Pair, surface_path
from pointup.datasets.pair_writer import write_pairs
from pointup.datasets.sample_table import UnreadableSample
from pointup.datasets.samples import Samples
from pointup.datasets.sizes import checked_integer, cropped_sizes
from pointup.datasets.table_store import open_samples

__all__ = [
    "BadSample",
    "JoinedSamples",
    "Pair",
    "PairDataset",
    "Samples",
    "find_bad_samples",
    "open_pairs",
    "open_samples",
    "read_pair",
    "surface_path",
    "write_pairs",
]


class PairDataset(torch.utils.data.Dataset[Data]):
    """The samples of a pair dataset, by key (epoch, index), or by index for epoch 0.

    The key of repetition k of a sample in an epoch is (epoch, index, k): each repetition gets its
    own augmentation. Negative indices count from the end. `keep` lists the samples that are used,
    or is a mask (n,) bool of them; indices refer to the samples that are left. A sample is a PyG
    `Data` with `pos` (N, 3) and `target` (M, 3) float32, `name`, `index`, `vertical`, and
    `target_normals` and `resample` if the pair has them. Its tensors are writable. The points of
    large clouds are in spatial order, which makes neighbour searches faster. `seconds` holds the
    durations of reading, augmenting and ordering. A sample that can't be read has no points and has
    `fault`, the reason; `collate` leaves it out.

    With `max_tokens`, a larger pair is cropped to the `max_tokens` points around a random source
    point. The random numbers of cropping and augmentation depend only on (seed, epoch, index), not
    on the worker, the process or a resume.

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
        keep: Sequence[int] | np.ndarray | None = None,
        max_tokens: int | None = None,
    ) -> None:
        if max_tokens is not None:
            max_tokens = checked_integer("max_tokens", max_tokens, 1)
        self.samples = samples if keep is None else samples.select(_kept(keep, len(samples)))
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
        if self.augment or self.max_tokens is not None:
            rng = np.random.default_rng([self.seed, epoch, index, *repetition])
            if self.max_tokens is not None:
                clouds = crop_pair(clouds, self.max_tokens, rng)
            if self.augment:
                clouds = augment_pair(clouds, vertical, rng, self.noise)
        is_augmented = time.perf_counter()
        clouds = in_spatial_order(clouds)
        tensors = {name: torch.from_numpy(points) for name, points in clouds.items()}
        return Data(
            pos=tensors.pop("source"),
            name=name,
            index=index,
            vertical=vertical,
            seconds={
                "reading": is_read - began,
                "augmenting": is_augmented - is_read,
                "ordering": time.perf_counter() - is_augmented,
            },
            **tensors,
        )


def _kept(keep: Sequence[int] | np.ndarray, number: int) -> np.ndarray:
    """The indices (k,) int64 of the kept samples of `number`; ValueError if they can't be."""
    kept = np.asarray(keep)
    if kept.dtype == bool:
        if kept.shape != (number,):
            raise ValueError(f"keep is a mask of shape {kept.shape}; there are {number} samples")
        return np.flatnonzero(kept)
    # An empty list has the type float64.
    if kept.ndim != 1 or (len(kept) and kept.dtype.kind not in "iu"):
        raise ValueError(
            f"keep must be a list of indices or a mask, not {kept.dtype} of shape {kept.shape}"
        )
    wrong = kept[(kept < 0) | (kept >= number)]
    if len(wrong):
        raise ValueError(f"keep has index {wrong[0]}; there are {number} samples")
    return kept.astype(np.int64)
