"""The phases of a pass, on the threads of one process or shared among several."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from pointup.upsampling.single_pass.upsampling_pass import UpsamplingPass
from pointup.upsampling.store.point_store import BLOCK_SIZE

TILE_SIZE = 65_536
"""Most points of a tile where its side isn't given."""
MODEL_SHARE, THINNING_SHARE, RELAXATION_SHARE = 0.55, 0.2, 0.25
"""WorkerGroup of the work, about."""

# Of the threads of an accelerator's host; they only look up neighbours.
_MAX_HOST_THREADS = 8

Item = TypeVar("Item")


class WorkerGroup(Protocol):
    """Processes that work on the same cloud. What one of them fails at ends the work of all."""

    num_processes: int
    is_main: bool

    def shard(self, items: Sequence[Item]) -> Sequence[Item]:
        """The part of the work that is this process's."""

    def barrier(self) -> AbstractContextManager[object]:
        """Work that all begin; nobody leaves it before all are done, and without an error."""


class Alone:
    """One process that does everything."""

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
    """Make the new points of a pass; then `made` has them.

    `tile` is the side of a tile. `report` is told how many of the cloud's points have been dealt
    with since it was last called, fractions of them too.
    """
    store = upsampling.store
    with one_thread_an_operation() as num_threads:
        num_threads = host_threads(upsampling.device, num_threads)
        num_workers = num_threads * workers.num_processes
        size = min(max(len(store) // (4 * num_workers), BLOCK_SIZE), TILE_SIZE)
        with workers.barrier():
            tiles = workers.shard(upsampling.tiles(size, tile))
            for done in _in_threads(upsampling.make_candidates, tiles, num_threads):
                num_points = store.block_ptr[done.stop] - store.block_ptr[done.start]
                report(MODEL_SHARE * num_points)
                _return_memory()
        _choose(upsampling, workers, num_threads, THINNING_SHARE, RELAXATION_SHARE, report)


def choose_from_second_pass(
    upsampling: UpsamplingPass,
    draft: UpsamplingPass,
    workers: WorkerGroup,
    report: Callable[[float], Any] = lambda points: None,
) -> None:
    """Choose the new points again, now from the points of a second pass over those of the first.

    See `UpsamplingPass.take_second_pass`.
    """
    with one_thread_an_operation() as num_threads:
        with workers.barrier():
            upsampling.take_second_pass(draft)
        num_threads = host_threads(upsampling.device, num_threads)
        with workers.barrier():
            blocks = workers.shard(range(len(upsampling)))
            for _ in _in_threads(upsampling.candidates_from_second_pass, blocks, num_threads):
                pass
        _choose(upsampling, workers, num_threads, 0.5, 0.5, report)


def _choose(
    upsampling: UpsamplingPass,
    workers: WorkerGroup,
    num_threads: int,
    thinning_share: float,
    relaxation_share: float,
    report: Callable[[float], Any],
) -> None:
    """Thin the candidates and even out what is left of them."""
    sizes = np.diff(upsampling.store.block_ptr)
    with workers.barrier():
        colors = upsampling.colors()
    for blocks in colors:
        with workers.barrier():
            for block in _in_threads(upsampling.thin, workers.shard(blocks), num_threads):
                report(thinning_share * sizes[block])
    with workers.barrier():
        every_block = workers.shard(range(len(upsampling)))
        for block in _in_threads(upsampling.relax_block, every_block, num_threads):
            report(relaxation_share * sizes[block])


def _return_memory() -> None:
    """Return what was freed to the system.

    glibc keeps it in pieces that fit less and less; after a hundred tiles, half of a process's
    memory was that.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def host_threads(device: torch.device, num_threads: int) -> int:
    """Threads of this process: those of torch, or beside an accelerator its part of the machine.

    A launcher for GPUs sets OMP_NUM_THREADS to 1, which is meant for operations; half of the work
    is the CPU's, and would be done on one core.
    """
    if device.type == "cpu":
        return num_threads
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return max(1, min(_MAX_HOST_THREADS, cores // processes))


@contextmanager
def one_thread_an_operation() -> Iterator[int]:
    """Torch's operations run on a single thread each; gives how many there are to share out.

    Many small operations side by side are faster than one after another on all cores, and their
    results don't depend on how many cores there are.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # oneDNN keeps what it compiles for every shape, up to 100 MB for the shapes of many tiles; on
    # one thread it is no faster than what torch does without it.
    uses_onednn, *_ = torch.backends.mkldnn.set_flags(False, _fp32_precision=None)
    try:
        yield num_threads
    finally:
        torch.backends.mkldnn.set_flags(uses_onednn, _fp32_precision=None)
        torch.set_num_threads(num_threads)


def _in_threads(
    work: Callable[[Item], object], items: Sequence[Item], num_threads: int
) -> Iterator[Item]:
    """Work on every item, and yield each once it is done."""
    if num_threads == 1:
        for item in items:
            work(item)
            yield item
        return
    pool = ThreadPoolExecutor(num_threads)
    try:
        futures = {pool.submit(work, item): item for item in items}
        for future in as_completed(futures):
            future.result()
            yield futures[future]
    finally:
        pool.shutdown(cancel_futures=True)
