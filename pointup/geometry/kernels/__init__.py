"""Triton kernels for neighbour search and thinning on CUDA devices.

Triton is part of torch's CUDA builds for Linux. It is imported only where a tensor is on a CUDA
device. All kernels work on packed clouds, compute in the dtype of the points (float32 or float64)
from differences of coordinates, and launch without waiting for the device. The first use in a
process tests all of them on small clouds (`trial`). Where one fails or gives wrong results, the
search in chunks replaces all kernels and a warning states the reason. POINTUP_KERNELS=0 in the
environment switches the kernels off.
"""

from __future__ import annotations

import functools
import os
import warnings

import torch
from torch import Tensor

from pointup.errors import ConfigError
from pointup.geometry.kernels import trial

MAX_K = 128
"""Most neighbours per point that the kernels find."""
SWITCH = "POINTUP_KERNELS"


def take(pos: Tensor, k: int) -> bool:
    """Whether the kernels support points of this shape and device, and k neighbours per point."""
    if pos.device.type != "cuda" or pos.shape[1:] != (3,) or not is_available(pos.device):
        return False
    if k > MAX_K:
        warn_of_many(k)
    return k <= MAX_K


@functools.cache
def is_available(device: torch.device) -> bool:
    """Whether the kernels work on a device. The first call tests them and warns where they fail."""
    if is_switched_off():
        return False
    problem = trial.problem(device)
    if problem is not None:
        warnings.warn(
            f"the Triton kernels are not used on {device}: {problem.text}. Neighbour search and "
            "thinning compare all points in chunks instead, many times slower; "
            f"{problem.remedy}",
            stacklevel=2,
        )
    return problem is None


def is_switched_off() -> bool:
    """Whether the environment switches the kernels off; ConfigError for values but 0 and 1."""
    switch = os.environ.get(SWITCH, "1")
    if switch not in ("0", "1"):
        raise ConfigError(f"{SWITCH} is {switch!r}; set it to 0 to switch kernels off, else to 1")
    return switch == "0"


@functools.cache
def warn_of_many(k: int) -> None:
    """Warn, once for each k, that the kernels do not find so many neighbours."""
    warnings.warn(
        f"{k} neighbours per point are more than the {MAX_K} that the kernels find: the search "
        "compares all points in chunks of 200 MB, in time quadratic in the size of a cloud",
        stacklevel=3,
    )
