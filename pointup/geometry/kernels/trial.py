"""Tests each kernel on small clouds against a brute force in float64 on the host.

Triton compiles a kernel at its first launch, with the machine's C compiler, Python headers and
driver: whether this works is known only after a trial.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pointup.errors import OUT_OF_MEMORY, PointupError

# An empty cloud, clouds within a tile, and one of several tiles with duplicate points.
SIZES, TARGET_SIZES = (130, 0, 1, 40), (60, 3, 1, 170)
# One kernel is compiled for each power of two; these are the ones that the included models use.
NUM_NEIGHBORS = (1, 8, 32, 128)
TOLERANCE = 1e-4


class Problem(NamedTuple):
    """The reason why the kernels can't be used, and what to install or update."""

    text: str
    remedy: str


def problem(device: torch.device) -> Problem | None:
    """The first problem with the kernels on a device; None where all give right results.

    Waits for the device. Raises PointupError where a kernel has left the device unusable, and
    out-of-memory errors as they are: they say nothing about the kernels.
    """
    if not importlib.util.find_spec("triton"):
        return Problem("triton is not installed", "pip install triton (Linux)")
    for name, is_right in TRIALS.items():
        try:
            if not is_right(device):
                return Problem(f"kernel {name} gives wrong results", OTHER_VERSION)
        # Errors of Triton, its compilers and drivers have no common base class.
        except Exception as error:
            if isinstance(error, MemoryError) or OUT_OF_MEMORY.search(str(error)):
                raise
            lines = str(error).strip().splitlines()
            cause = ": ".join([type(error).__name__, *lines[:1]])
            try:
                torch.zeros(1, device=device).item()
            except RuntimeError as unusable:
                raise PointupError(
                    f"kernel {name} has left {device} unusable ({cause}); start again with "
                    "POINTUP_KERNELS=0"
                ) from unusable
            return Problem(f"kernel {name} fails ({cause})", remedy(error))
    return None


OTHER_VERSION = "install the version of triton that torch requires"


def remedy(error: Exception) -> str:
    """What to install or update where compiling or running a kernel raises this error."""
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "install a C compiler (apt install gcc), or name one in CC"
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if isinstance(error, subprocess.CalledProcessError) and not headers.is_file():
        return f"install Python's headers (apt install python3-dev): {headers} doesn't exist"
    if torch.version.hip:
        return "triton's AMD backend doesn't compile it: update ROCm and torch"
    if re.search("unsupported (ptx|toolchain)|kernel image|invalid ptx", str(error).lower()):
        return "update the GPU's driver: it doesn't support the code that this triton compiles"
    return OTHER_VERSION


def clouds(sizes: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor]:
    """Points (N, 3) float32 on the host, with duplicates in the first cloud, and their ptr."""
    points = np.random.default_rng(seed).normal(size=(sum(sizes), 3)).astype(np.float32)
    points[: sizes[0] : 9] = points[sizes[0] // 2]
    return torch.from_numpy(points), torch.tensor([0, *np.cumsum(sizes)])


def pair_distances(query: Tensor, query_ptr: Tensor, pos: Tensor, ptr: Tensor) -> Tensor:
    """Squared distances (Q, N) in float64, inf between clouds."""
    squared = (query[:, None].double() - pos[None].double()).square().sum(2)
    cloud, other = (
        torch.arange(len(ptr) - 1).repeat_interleave(bounds[1:] - bounds[:-1])
        for bounds in (query_ptr, ptr)
    )
    return squared.masked_fill(cloud[:, None] != other, torch.inf)


def are_nearest(index: Tensor, *clouds: Tensor) -> bool:
    """Whether `index` (Q, k) are the nearest k points of each query, each once, then -1."""
    pairs = torch.nn.functional.pad(pair_distances(*clouds), (0, index.shape[1]), value=torch.inf)
    # An index of -1 selects a column of inf.
    found, expected = pairs.gather(1, index % pairs.shape[1]), pairs.sort(1).values
    ordered = index.sort(1).values
    is_repeated = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    is_near = torch.allclose(found, expected[:, : index.shape[1]], rtol=TOLERANCE)
    return is_near and not is_repeated.any()


def try_knn(device: torch.device) -> bool:
    from pointup.geometry.kernels.knn import knn_search

    points, others = clouds(SIZES, 2), clouds(TARGET_SIZES, 3)
    pos, ptr, query, query_ptr = (values.to(device) for values in (*points, *others))
    for k in NUM_NEIGHBORS:
        own = knn_search(pos, ptr, pos, ptr, k)[1].cpu()
        # As upsampling searches, or for the one nearest as training does.
        dtype = torch.float64 if k > 1 else torch.float32
        index = knn_search(query.to(dtype), query_ptr, pos.to(dtype), ptr, k)[1].cpu()
        if not (are_nearest(own, *points, *points) and are_nearest(index, *others, *points)):
            return False
        # Among copies of a point, the point itself comes first.
        if not torch.equal(own[:, 0], torch.arange(len(pos))):
            return False
    return True


def try_insertion(device: torch.device) -> bool:
    from pointup.geometry.kernels.insertion import settle

    pos, ptr = clouds(SIZES, 5)
    coarse = torch.arange(0, int(ptr[1]), 4)
    # The coarser sample is a cloud of its own.
    pos, ptr = torch.cat([pos, pos[coarse]]), torch.cat([ptr, ptr[-1:] + len(coarse)])
    parent = torch.full((len(pos),), -1)
    parent[coarse] = torch.arange(len(pos) - len(coarse), len(pos))
    squared, index = pair_distances(pos, ptr, pos, ptr).float().topk(16, largest=False)
    reach = squared[:, -1]
    is_near = (squared > 0) & (squared < torch.minimum(reach[:, None], reach[index]))
    neighbor = torch.where(is_near, index, -1)
    # All different: the order of equal radii depends on the kernel.
    limit = (0.5 * torch.from_numpy(np.random.default_rng(6).permutation(len(pos)))).float()
    inputs = (neighbor.int(), squared, parent.int(), limit)
    neighbors, lengths, parents, limits = (values.contiguous().to(device) for values in inputs)
    found = settle(neighbors, lengths, parents, limits, num_levels=2).cpu()
    # A radius is the least distance to a near point with a larger radius, or its own bound.
    is_before = is_near & (found[index] > found[:, None])
    expected = squared.masked_fill(~is_before, torch.inf).amin(1)
    bound = torch.maximum(limit, torch.where(parent < 0, 0.0, found[parent]))
    return torch.equal(found, torch.minimum(expected, bound))


TRIALS: dict[str, Callable[[torch.device], bool]] = {"knn": try_knn, "insertion": try_insertion}
