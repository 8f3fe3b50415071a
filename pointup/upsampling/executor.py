"""Runs the phases of an upsampling pass on the threads of one process or of several."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from pointup.processes import num_cores
from pointup.upsampling.ground_points import (
    LARGEST_SHARE,
    GroundPoints,
    GroundReturns,
    ground_surface,
    may_have_ground,
)
from pointup.upsampling.options import UpsampleOptions
from pointup.upsampling.single_pass.upsampling_pass import UpsamplingPass
from pointup.upsampling.store.point_store import BLOCK_SIZE, Store

TILE_SIZE = 65_536
"""Largest number of points in a tile for which no side length is given."""
MODEL_SHARE, THINNING_SHARE, RELAXATION_SHARE = 0.55, 0.2, 0.25
"""Approximate shares of the total time, for the progress bar."""

Item = TypeVar("Item")


class WorkerGroup(Protocol):
    """Processes that upsample the same cloud together. An error in one of them stops all."""

    num_processes: int
    is_main: bool

    def shard(self, items: Sequence[Item]) -> Sequence[Item]:
        """The items that this process works on."""

    def barrier(self) -> AbstractContextManager[object]:
        """Context that no process leaves before all have; an error in one is raised in all."""


class SingleProcess:
    """A worker group of one process."""

    num_processes = 1
    is_main = True

    def shard(self, items: Sequence[Item]) -> Sequence[Item]:
        return items

    def barrier(self) -> AbstractContextManager[object]:
        return nullcontext()


def run_upsampling(
    upsampling: UpsamplingPass,
    workers: WorkerGroup,
    tile: float | None = None,
    report: Callable[[float], Any] = lambda points: None,
) -> None:
    """Run all phases of a pass: candidates, thinning, relaxation. The result is its `output`.

    `tile` is the side length of a tile. `report` is called with the number of points of the cloud
    that were processed since its last call; the number can be fractional.
    """
    store = upsampling.store
    with single_threaded_operations() as num_threads:
        num_threads = host_threads(upsampling.device, num_threads)
        num_workers = num_threads * workers.num_processes
        size = min(max(len(store) // (4 * num_workers), BLOCK_SIZE), TILE_SIZE)
        with workers.barrier():
            tiles = workers.shard(upsampling.tiles(size, tile))
            for done in _in_threads(upsampling.make_candidates, tiles, num_threads):
                num_points = store.block_ptr[done.stop] - store.block_ptr[done.start]
                report(MODEL_SHARE * num_points)
                return_memory()
        _thin_and_relax(upsampling, workers, num_threads, THINNING_SHARE, RELAXATION_SHARE, report)


def choose_from_second_pass(
    upsampling: UpsamplingPass,
    second_pass: UpsamplingPass,
    workers: WorkerGroup,
    report: Callable[[float], Any] = lambda points: None,
) -> None:
    """Select the new points again, with the output of a second pass as further candidates.

    See `UpsamplingPass.take_second_pass`. `report` is called as in `run_upsampling`.
    """
    with single_threaded_operations() as num_threads:
        with workers.barrier():
            upsampling.take_second_pass(second_pass)
        num_threads = host_threads(upsampling.device, num_threads)
        with workers.barrier():
            blocks = workers.shard(range(len(upsampling)))
            for _ in _in_threads(upsampling.candidates_from_second_pass, blocks, num_threads):
                pass
        _thin_and_relax(upsampling, workers, num_threads, 0.5, 0.5, report)


def make_ground_points(
    measured: Store, options: UpsampleOptions, workers: WorkerGroup
) -> GroundPoints | None:
    """The new points on the ground below crowns; None without any.

    Where they would be more than `LARGEST_SHARE` of the new points, their density is lower.
    """
    if not options.above_ground or options.ground_density == 0:
        return None
    num_out = options.num_out(len(measured))
    num_new = num_out - len(measured) if options.originals else num_out
    most = min(int(LARGEST_SHARE * num_new), num_out - len(measured))

    def every_block(work: Callable[[int], object]) -> None:
        with single_threaded_operations() as num_threads, workers.barrier():
            for _ in _in_threads(work, workers.shard(range(measured.num_blocks)), num_threads):
                pass

    with workers.barrier():
        returns = GroundReturns(measured)
    if not (returns.by_class or may_have_ground(returns)):
        return None
    every_block(returns.save)
    limits = [given for given in (options.ground_density, options.density) if given is not None]
    density = min(limits, default=None)
    while most and (surface := ground_surface(returns, density)):
        ground = GroundPoints(returns, surface, options)
        every_block(ground.make)
        num_made = ground.output.num_new()
        if num_made <= most:
            return ground if num_made else None
        density = 0.9 * surface.density * most / num_made
        with workers.barrier():
            pass  # All processes have counted.
    return None


def _thin_and_relax(
    upsampling: UpsamplingPass,
    workers: WorkerGroup,
    num_threads: int,
    thinning_share: float,
    relaxation_share: float,
    report: Callable[[float], Any],
) -> None:
    """Thin the candidates of every block, then relax the selected points."""
    sizes = np.diff(upsampling.store.block_ptr)
    with workers.barrier():
        colors = upsampling.colors(num_threads * workers.num_processes)
    for of_color in colors:
        with workers.barrier():
            for blocks in _in_threads(upsampling.thin, workers.shard(of_color), num_threads):
                report(thinning_share * sizes[blocks].sum())
    if upsampling.groups:
        with workers.barrier():
            groups = workers.shard(upsampling.groups)
            for _ in _in_threads(upsampling.relax_group, groups, num_threads):
                pass
    with workers.barrier():
        every_block = workers.shard(range(len(upsampling)))
        for block in _in_threads(upsampling.relax_block, every_block, num_threads):
            report(relaxation_share * sizes[block])


def return_memory() -> None:
    """Return freed memory to the operating system.

    glibc keeps freed memory in fragments. After a hundred tiles, fragments were half of the memory
    of a process.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def host_threads(device: torch.device, num_threads: int) -> int:
    """Number of CPU threads to run tiles and blocks on, for a model on `device`.

    On the CPU this is `num_threads`. With an accelerator it is the cores of the machine divided by
    its processes: a GPU launcher sets OMP_NUM_THREADS to 1, and half of the work runs on the CPU.
    """
    if device.type == "cpu":
        return num_threads
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return max(1, num_cores() // processes)


# Number of threads and use of oneDNN before the first of several overlapping upsamplings.
_before = SimpleNamespace(lock=threading.Lock(), depth=0, num_threads=1, uses_onednn=True)


@contextmanager
def single_threaded_operations() -> Iterator[int]:
    """Run every torch operation on one thread; yields the number of threads torch used before.

    Many small operations in parallel are faster than one after another on all cores, and their
    results do not depend on the number of cores. Upsamplings in several Python threads may overlap:
    the settings before the first are those after the last.
    """
    with _before.lock:
        if not _before.depth:
            _before.num_threads = torch.get_num_threads()
            # oneDNN caches compiled code for every shape, up to 100 MB for many tiles. On one
            # thread it is no faster than torch without it.
            _before.uses_onednn, *_ = torch.backends.mkldnn.set_flags(False, _fp32_precision=None)
        _before.depth += 1
        num_threads = _before.num_threads
        torch.set_num_threads(1)
    try:
        yield num_threads
    finally:
        with _before.lock:
            _before.depth -= 1
            # Each Python thread has a number of its own, so each sets it back.
            torch.set_num_threads(num_threads)
            if not _before.depth:
                torch.backends.mkldnn.set_flags(_before.uses_onednn, _fp32_precision=None)


def _in_threads(
    work: Callable[[Item], object], items: Sequence[Item], num_threads: int
) -> Iterator[Item]:
    """Call `work` on every item, in threads, and yield each item when it is done.

    Threads start far from each other: much of what is computed for an item serves its neighbours as
    well, and threads at work on neighbours would wait for each other.
    """
    if num_threads == 1:
        for item in items:
            work(item)
            yield item
        return
    # A new thread has the number that was set last, in any thread: another upsampling may just have
    # set it back.
    pool = ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,))
    try:
        stride = -(-len(items) // num_threads)
        far_apart = (item for first in range(stride) for item in items[first::stride])
        futures = {pool.submit(work, item): item for item in far_apart}
        for future in as_completed(futures):
            future.result()
            yield futures[future]
    finally:
        pool.shutdown(cancel_futures=True)
