"""Tests each kernel on small clouds against a brute force in float64 on the host.

Triton compiles a kernel at its first launch, with the machine's C compiler, Python headers and
driver: whether this works is known only after a trial.
"""

from __future__ import annotations

import importlib.util
import os
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
SIZES = (130, 0, 1, 40)
TARGET_SIZES = (60, 3, 1, 170)
NUM_NEIGHBORS = 5
# More points than fit in the registers of one program, so that both thinning kernels are tested.
LARGE = 9000
NUM_PICKS = 20
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
    for name, trial in TRIALS.items():
        try:
            if not trial(device):
                text = f"kernel {name} gives wrong results"
                return Problem(text, "install the version of triton that torch requires")
        # Errors of Triton, its compilers and drivers have no common base class.
        except Exception as error:
            if is_out_of_memory(error):
                raise
            expect_usable(device, name, error)
            return Problem(f"kernel {name} fails ({first_line(error)})", remedy(error))
    return None


def expect_usable(device: torch.device, name: str, cause: Exception) -> None:
    """Raise PointupError where an error has left the device unusable; out-of-memory errors pass."""
    try:
        torch.zeros(1, device=device).item()
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise PointupError(
            f"kernel {name} has left {device} unusable ({first_line(cause)}); start again with "
            "POINTUP_KERNELS=0"
        ) from error


def is_out_of_memory(error: Exception) -> bool:
    """Whether torch's allocator, the driver, a library or the host ran out of memory."""
    is_known = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    return is_known or OUT_OF_MEMORY.search(str(error)) is not None


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def remedy(error: Exception) -> str:
    """What to install or update where compiling or running a kernel raises this error."""
    text = str(error).lower()
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "install a C compiler (apt install gcc), or name one in CC"
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if isinstance(error, subprocess.CalledProcessError) and not headers.is_file():
        return f"install Python's headers (apt install python3-dev): {headers} doesn't exist"
    if torch.version.hip:
        return "triton's AMD backend doesn't compile it: update ROCm and torch"
    if "libcuda" in text:
        return "make libcuda.so.1, which is part of the driver, known to ldconfig"
    too_new = ("unsupported ptx", "unsupported toolchain", "kernel image", "invalid ptx")
    if any(phrase in text for phrase in too_new):
        return "update the GPU's driver: it doesn't support the code that this triton compiles"
    if "out of resource" in text or "shared memory" in text:
        return "this GPU has too few registers or too little shared memory for it"
    return "install the version of triton that torch requires"


def clouds(sizes: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor]:
    """Points (N, 3) float32 on the host, some of them duplicates, and their ptr."""
    rng = np.random.default_rng(seed)
    points = rng.normal(size=(sum(sizes), 3)).astype(np.float32)
    points[::9] = points[len(points) // 2]
    return torch.from_numpy(points), torch.tensor([0, *np.cumsum(sizes)])


def pair_distances(query: Tensor, query_ptr: Tensor, pos: Tensor, ptr: Tensor) -> Tensor:
    """Squared distances (Q, N) in float64, inf between clouds."""
    squared = (query[:, None].double() - pos[None].double()).square().sum(2)
    cloud, other = (
        torch.arange(len(ptr) - 1).repeat_interleave(bounds[1:] - bounds[:-1])
        for bounds in (query_ptr, ptr)
    )
    return squared.masked_fill(cloud[:, None] != other, torch.inf)


def is_close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found.double(), expected, rtol=TOLERANCE, atol=1e-10)


def try_nearest(device: torch.device) -> bool:
    from pointup.geometry.kernels.nearest import nearest_index, nearest_index_both

    sets = *clouds(SIZES, 0), *clouds(TARGET_SIZES, 1)
    there = tuple(values.to(device) for values in sets)
    num_pos = len(sets[0])
    pairs = torch.nn.functional.pad(pair_distances(*sets), (0, 1), value=torch.inf)
    expected = pairs.amin(1)
    both = nearest_index_both(torch.cat([there[0], there[2]]), num_pos, there[1], there[3]).cpu()
    to_target, to_pos = (both[:num_pos] - num_pos).clamp(min=-1), both[num_pos:]
    # An index of -1 selects the appended column of inf.
    for index in (nearest_index(*there).cpu(), to_target):
        if not is_close(pairs[torch.arange(len(index)), index], expected):
            return False
    chosen = pairs[to_pos, torch.arange(len(to_pos))].masked_fill(to_pos < 0, torch.inf)
    return is_close(chosen, pairs[:, :-1].amin(0))


def try_knn(device: torch.device) -> bool:
    from pointup.geometry.kernels.knn import knn_search

    pos, ptr = clouds(SIZES, 2)
    query, query_ptr = clouds(TARGET_SIZES, 3)
    for queries, queries_ptr in ((query, query_ptr), (pos, ptr)):
        points = pos.to(device), ptr.to(device)
        searched = points if queries is pos else (queries.to(device), queries_ptr.to(device))
        squared, index = (found.cpu() for found in knn_search(*searched, *points, NUM_NEIGHBORS))
        pairs = torch.nn.functional.pad(
            pair_distances(queries, queries_ptr, pos, ptr), (0, NUM_NEIGHBORS), value=torch.inf
        )
        expected = pairs.sort(1).values[:, :NUM_NEIGHBORS]
        chosen = pairs.gather(1, index % pairs.shape[1])
        ordered = index.sort(1).values
        is_repeated = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
        if not (is_close(squared, expected) and is_close(chosen, expected)) or is_repeated.any():
            return False
        # Among copies of a point, the point itself comes first.
        if queries is pos and not torch.equal(index[:, 0], torch.arange(len(pos))):
            return False
    return True


def try_farthest(device: torch.device) -> bool:
    from pointup.geometry.kernels.farthest import farthest_points

    for sizes in (SIZES, (LARGE, *SIZES)):
        pos, ptr = clouds(sizes, 4)
        counts = [min(size, NUM_PICKS) for size in sizes]
        there = pos.to(device), ptr.to(device)
        index = farthest_points(*there, ptr.tolist(), counts).cpu()
        if len(index.unique()) != len(index):
            return False
        for cloud, picks in enumerate(index.split(counts)):
            points = pos[ptr[cloud] : ptr[cloud + 1]].double()
            distance = torch.full_like(points[:, 0], torch.inf)
            for pick in (picks - ptr[cloud]).tolist():
                if not 0 <= pick < len(points):
                    return False
                if distance[pick] < distance.amax() * (1 - TOLERANCE):
                    return False
                squared = (points - points[pick]).square().sum(1)
                distance = torch.minimum(distance, squared)
    return True


def try_insertion(device: torch.device) -> bool:
    from pointup.geometry.kernels.insertion import settle

    pos, ptr = clouds(SIZES, 5)
    coarse = torch.arange(0, int(ptr[1]), 4)
    pos = torch.cat([pos, pos[coarse]])
    parent = torch.full((len(pos),), -1)
    parent[coarse] = torch.arange(int(ptr[-1]), len(pos))
    # The coarser sample is a cloud of its own.
    ptr = torch.cat([ptr, torch.tensor([len(pos)])])
    squared, index = pair_distances(pos, ptr, pos, ptr).float().topk(16, largest=False)
    reach = squared[:, -1]
    is_near = (squared > 0) & (squared < torch.minimum(reach[:, None], reach[index]))
    neighbor = torch.where(is_near, index, -1)
    # All different: the order of equal radii depends on the kernel.
    limit = (0.5 * torch.from_numpy(np.random.default_rng(6).permutation(len(pos)))).float()

    def there(values: Tensor) -> Tensor:
        return values.contiguous().to(device)

    arguments = there(neighbor.int()), there(squared), there(parent.int()), there(limit)
    found = settle(*arguments, num_levels=2).cpu()
    # A radius is the least distance to a near point with a larger radius, or its own bound.
    is_before = is_near & (found[index] > found[:, None])
    expected = squared.masked_fill(~is_before, torch.inf).amin(1)
    bound = torch.maximum(limit, torch.where(parent < 0, 0.0, found[parent]))
    expected = torch.minimum(expected, bound)
    return torch.equal(found, expected)


TRIALS: dict[str, Callable[[torch.device], bool]] = {
    "nearest": try_nearest,
    "knn": try_knn,
    "farthest": try_farthest,
    "insertion": try_insertion,
}
