"""Triton kernels of the searches and of thinning on CUDA devices.

Triton comes with torch's CUDA builds for Linux, and is imported only where a tensor is on such a
device. All kernels work on packed clouds, compute in the dtype of the points (float32 or float64)
from differences of coordinates, and launch without waiting for the device. Their first use in a
process tries all of them on small clouds (`trial`); where one fails or is wrong, the plain searches
serve instead, and a warning says why. POINTUP_KERNELS=0 in the environment switches them off.
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
"""Neighbours a point that the kernels find at most."""
SWITCH = "POINTUP_KERNELS"


def take(pos: Tensor, k: int) -> bool:
    """Whether the kernels search points like these for k neighbours."""
    if pos.device.type != "cuda" or pos.shape[1:] != (3,) or not is_available(pos.device):
        return False
    if k > MAX_K:
        warn_of_many(k)
    return k <= MAX_K


@functools.cache
def is_available(device: torch.device) -> bool:
    """Whether the kernels work on a device; the first call tries them, and warns if they don't."""
    if is_switched_off():
        return False
    problem = trial.problem(device)
    if problem is not None:
        warnings.warn(
            f"the Triton kernels are not used on {device}: {problem.text}. Neighbours and even "
            "subsets are found by exact differences in chunks, many times slower; "
            f"{problem.remedy}",
            stacklevel=2,
        )
    return problem is None


def is_switched_off() -> bool:
    """Whether the environment switches the kernels off; ConfigError where it says neither."""
    switch = os.environ.get(SWITCH, "1")
    if switch not in ("0", "1"):
        raise ConfigError(f"{SWITCH} is {switch!r}; set it to 0 to do without kernels, else to 1")
    return switch == "0"


@functools.cache
def warn_of_many(k: int) -> None:
    """Says once for each k that it is more than the kernels find."""
    warnings.warn(
        f"{k} neighbours a point are more than the {MAX_K} that the kernels find: all distances "
        "are compared, in chunks of 200 MB, which takes the square of a cloud's size",
        stacklevel=3,
    )
