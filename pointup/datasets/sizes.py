"""The sizes of samples that a sampler plans with: their checks and their checksum."""

from __future__ import annotations

import operator
import zlib
from collections.abc import Sequence
from typing import SupportsIndex

import numpy as np

from pointup.errors import ConfigError

SIZES_PER_CHUNK = 1 << 20


def checked_integer(name: str, value: SupportsIndex, least: int) -> int:
    """An integer of any type, also NumPy's, as an int; ValueError below `least` and for others."""
    try:
        number = int(operator.index(value))
    except TypeError:
        raise ValueError(f"{name} is {value!r}; it must be an integer") from None
    if number < least:
        raise ValueError(f"{name} is {number}; it must be at least {least}")
    return number


def cropped_sizes(sizes: np.ndarray, limit: int) -> np.ndarray:
    """The sizes (n,), with `limit` for those above it; `limit` may be too large for their type."""
    return np.minimum(sizes, min(limit, np.iinfo(sizes.dtype).max))


def checked_sizes(sizes: Sequence[int] | np.ndarray) -> np.ndarray:
    """Sizes (n,) int32, or int64 if one needs it; ValueError if they are no sizes.

    An array of the right type is not copied.
    """
    array = np.asarray(sizes)
    if array.ndim != 1 or len(array) == 0 or array.dtype.kind not in "iu":
        raise ValueError(
            f"sizes must be a list of integers, one per sample; got {array.dtype} {array.shape}"
        )
    if array.min() < 0:
        raise ValueError(f"size of sample {array.argmin()} is {array.min()}")
    return array.astype(np.int32 if array.max() < 2**31 else np.int64, copy=False)


def checksum_of_sizes(sizes: np.ndarray) -> int:
    """The CRC-32 of the sizes as int64."""
    checksum = 0
    for start in range(0, len(sizes), SIZES_PER_CHUNK):
        chunk = sizes[start : start + SIZES_PER_CHUNK].astype(np.int64)
        checksum = zlib.crc32(chunk.data, checksum)
    return checksum


def check_budget(
    sizes: np.ndarray, token_budget: int, names: Sequence[str] | np.ndarray | None
) -> None:
    """Raise ConfigError, naming the largest sample, if it exceeds the budget."""
    too_large = int((sizes > token_budget).sum())
    if too_large:
        largest = int(sizes.argmax())
        name = f"sample {largest}" if names is None else names[largest]
        others = f" ({too_large} samples are too large)" if too_large > 1 else ""
        raise ConfigError(
            f"{name} has {sizes[largest]} points, more than the token budget of {token_budget}"
            f"{others}: raise --token-budget to at least {sizes[largest]}, or give --crop"
        )
