"""Triton kernels of the searches and of thinning on CUDA devices.

Triton comes with torch's CUDA builds for Linux, and is imported only where a tensor is on such a
device. All kernels work on packed clouds, compute in the dtype of the points (float32 or float64)
from differences of coordinates, and launch without waiting for the device.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings

from torch import Tensor

MAX_K = 32
"""Neighbours a point that the kernels find at most."""


def take(pos: Tensor, k: int) -> bool:
    """Whether the kernels search points like these for k neighbours."""
    return pos.device.type == "cuda" and pos.shape[1:] == (3,) and k <= MAX_K and is_available()


@functools.cache
def is_available() -> bool:
    """Whether triton is installed; says once what it means that it is not."""
    if importlib.util.find_spec("triton"):
        return True
    warnings.warn(
        "triton is not installed: neighbours and farthest points on CUDA are found by exact "
        "differences in chunks, many times slower; pip install triton (Linux)",
        stacklevel=2,
    )
    return False
