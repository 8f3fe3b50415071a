"""How often the samples of several datasets are seen in an epoch, by the weight of each dataset."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pointup.datasets.packing import checked_integer


@dataclass(frozen=True)
class Mixture:
    """Several datasets as one, whose samples follow each other, each dataset with a weight.

    A weight is the number of times that an epoch has each sample of the dataset. With a weight that
    is not a whole number, an epoch has some samples once more than others, and others in the next
    epochs: after E epochs each sample was seen floor(E * weight) or ceil(E * weight) times.

    Attributes:
        lengths: number of samples of each dataset.
        weights: weight of each dataset.
    """

    lengths: tuple[int, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.lengths) != len(self.weights) or not len(self.lengths):
            raise ValueError(f"{len(self.weights)} weights for {len(self.lengths)} datasets")
        # A checkpoint and the process that plans ahead take them as JSON, which has no NumPy types.
        lengths = tuple(checked_integer("a length", length, 0) for length in self.lengths)
        object.__setattr__(self, "lengths", lengths)
        object.__setattr__(self, "weights", tuple(map(float, self.weights)))
        if not all(0 < weight < math.inf for weight in self.weights):
            raise ValueError(f"weights {self.weights}: each must be greater than 0, and finite")
        if not any(n * w >= 1 for n, w in zip(self.lengths, self.weights, strict=True)):
            raise ValueError(
                f"weights {self.weights} of {self.lengths} samples: an epoch would have no sample; "
                "increase the weights"
            )

    def __len__(self) -> int:
        """Number of samples, each counted once."""
        return sum(self.lengths)

    @property
    def is_plain(self) -> bool:
        """Whether each epoch has each sample once."""
        return all(weight == 1 for weight in self.weights)

    def samples(self, seed: int, epoch: int) -> np.ndarray:
        """The samples (n,) int64 of an epoch, ascending: index + k * len(self) for repetition k.

        A function of the seed, the epoch, the lengths and the weights alone.
        """
        total = len(self)
        if self.is_plain:
            return np.arange(total)
        found, first = [], 0
        for number, (length, weight) in enumerate(zip(self.lengths, self.weights, strict=True)):
            phase = _phases(length, weight, [seed, number])
            times = np.floor(weight * (epoch + 1) + phase) - np.floor(weight * epoch + phase)
            indices = np.arange(first, first + length)
            for repetition in range(int(times.max(initial=0))):
                found.append(indices[times > repetition] + repetition * total)
            first += length
        return np.sort(np.concatenate(found))

    def as_state(self) -> list[list[float]]:
        """Length and weight of each dataset, as JSON values for a checkpoint."""
        return [list(pair) for pair in zip(self.lengths, self.weights, strict=True)]


def _phases(length: int, weight: float, seed: list[int]) -> np.ndarray:
    """Evenly spaced numbers in (0, 1), one for each sample, in random order.

    They say in which epochs a sample is seen once more. Because they are evenly spaced, all epochs
    have the same number of samples, plus or minus one.
    """
    if weight == int(weight):
        return np.zeros(length)
    return (np.random.default_rng(seed).permutation(length) + 0.5) / length
