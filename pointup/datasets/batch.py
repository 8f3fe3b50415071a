"""Collates samples into a PyG batch, and builds the DataLoader whose workers do so."""

from __future__ import annotations

import atexit
import copy
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from tempfile import gettempdir
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data._utils import MP_STATUS_CHECK_INTERVAL
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter
from torch_geometric.data import Batch, Data

from pointup.datasets.pair_dataset import PairDataset
from pointup.errors import TrainingError
from pointup.geometry.packed import batch_from_ptr, copied_ahead, ptr_from_sizes, to_device
from pointup.processes import end_with_parent, from_fork_server, ignore_signals, signals_blocked

CPU = torch.device("cpu")
MAX_OPEN_FILES = 65536
SECONDS_TO_EXIT = 5.0


def collate(samples: Iterable[Data]) -> Batch:
    """Collate samples of a `PairDataset` into one packed batch.

    The batch has `pos` (N, 3), `batch` (N,), `ptr` (B + 1,), the same for the target as `target`
    (M, 3), `target_batch`, `target_ptr`, and `name` (list of B) and `index` (B,) int64. It has
    `target_normals` (M, 3), and `resample` (K, 3) with `resample_ptr`, if any sample has them. A
    sample without them gets zero normals and no points of `resample`, so that a cloud is treated
    the same in every batch. `core` is the list of their cores. An empty list gives an empty batch.
    `seconds` maps each stage of the data loading to its duration. Samples that can't be read are
    left out: `faults` has (index, name, reason) of each.
    """
    began = time.perf_counter()
    samples = list(samples)
    faults = [(s.index, s.name, s.fault) for s in samples if "fault" in s]
    samples = [sample for sample in samples if "fault" not in sample]
    pos, ptr = _pack([sample.pos for sample in samples])
    target, target_ptr = _pack([sample.target for sample in samples])
    # `Batch.from_data_list` is not used: it would add offsets to attributes whose names contain
    # "index".
    batch = Batch(
        pos=pos,
        batch=batch_from_ptr(ptr, len(pos)),
        ptr=ptr,
        target=target,
        target_batch=batch_from_ptr(target_ptr, len(target)),
        target_ptr=target_ptr,
        name=[sample.name for sample in samples],
        index=torch.tensor([sample.index for sample in samples], dtype=torch.int64, device=CPU),
    )
    if any("target_normals" in sample for sample in samples):
        normals = [s.get("target_normals", torch.zeros_like(s.target)) for s in samples]
        batch.target_normals = torch.cat(normals)
    if any("resample" in sample for sample in samples):
        empty = torch.empty((0, 3), dtype=torch.float32, device=CPU)
        clouds = [sample.get("resample", empty) for sample in samples]
        batch.resample, batch.resample_ptr = _pack(clouds)
    seconds = sum((Counter(sample.get("seconds", {})) for sample in samples), Counter())
    batch.core = [sample.get("core") for sample in samples]
    batch.faults = faults
    batch.seconds = {**seconds, "packing": time.perf_counter() - began}
    return batch


def move(batch: Batch, device: torch.device) -> Batch:
    """A copy of the batch on the device; the given one stays on the host, where its bounds and
    `index` are read without waiting. The values of the copy's `ptr` tensors stay known there."""
    # `Batch.to` changes the batch itself, and leaves it in parts on two devices where memory ends.
    moved = copy.copy(batch).to(device, non_blocking=copied_ahead(device))
    for name in ("ptr", "target_ptr", "resample_ptr"):
        if name in batch:
            moved[name] = to_device(batch[name], device)
    return moved


def num_tokens(batch: Batch) -> int:
    """Number of points of a batch in source and target."""
    return len(batch.pos) + len(batch.target)


def _pack(clouds: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    sizes = torch.tensor([len(cloud) for cloud in clouds], dtype=torch.int64, device=CPU)
    none = torch.empty((0, 3), dtype=torch.float32, device=CPU)
    return torch.cat([none, *clouds]), ptr_from_sizes(sizes)


def make_loader(
    dataset: PairDataset,
    batch_sampler: Iterable[list[tuple[int, ...]]],
    num_workers: int = 0,
    timeout: float = 300.0,
    device: torch.device = CPU,
) -> DataLoader[Data]:
    """Build a loader of collated batches, in the order of the batch sampler.

    Workers persist across epochs. They ignore Ctrl-C, SIGTERM and SIGHUP, which the whole process
    group receives: the training process ends them. If a batch of a worker takes longer than
    `timeout` seconds, the loader raises RuntimeError; without workers there is no timeout. For
    CUDA and XPU devices, batches are in pinned memory, so that the copy to the device does not
    block. For all devices but the CPU, workers come from a fork server, because libraries of
    devices, as CUDA and NCCL, must not be forked; the dataset must be picklable then.
    """
    if num_workers:
        _raise_open_files_limit()
        # A function that is registered twice runs twice.
        atexit.unregister(_end_workers)
        atexit.register(_end_workers)
    forks = not num_workers or device.type == "cpu"
    context = None if forks else from_fork_server(__name__)
    return _Loader(
        dataset,
        batch_sampler=batch_sampler,
        collate_fn=collate,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        pin_memory=copied_ahead(device),
        timeout=timeout if num_workers else 0,
        worker_init_fn=_start_worker,
        multiprocessing_context=context,
    )


class _Batches(_MultiProcessingDataLoaderIter):
    """Looks for dead workers often: of those from a fork server no signal tells."""

    def __next__(self) -> Any:
        with _lost_workers_named(getattr(self, "_pin_memory_thread", None)):
            return super().__next__()

    def _try_get_data(self, timeout: float = MP_STATUS_CHECK_INTERVAL) -> tuple[bool, Any]:
        until = time.monotonic() + timeout
        while True:
            left = max(0.0, until - time.monotonic())
            try:
                found, batch = super()._try_get_data(min(left, MP_STATUS_CHECK_INTERVAL))
            except (EOFError, ConnectionError) as error:
                # The tensors of a dead worker are lost; its end is known a moment later.
                if not wait([worker.sentinel for worker in self._workers], timeout=1.0):
                    raise
                raise RuntimeError("DataLoader worker exited unexpectedly") from error
            if found or left <= MP_STATUS_CHECK_INTERVAL:
                return found, batch


@contextmanager
def _lost_workers_named(pinning: Thread | None) -> Iterator[None]:
    """Raise a TrainingError where a data worker can't be reached."""
    try:
        yield
    except (ConnectionError, FileNotFoundError, RuntimeError) as error:
        if isinstance(error, OSError):
            # Those of a dataset name a file, and those that a worker reports have no number.
            is_lost = error.errno is not None and error.filename is None
        else:
            # The thread that pins batches meets that error and ends: the loader times out.
            is_gone = pinning is not None and not pinning.is_alive()
            is_lost = is_gone and str(error).startswith("DataLoader timed out")
        if not is_lost:
            raise
        raise TrainingError(
            f"no connection to a data worker ({error!r}); was {gettempdir()} emptied, where Python "
            "keeps the socket? The same command again continues from the last checkpoint"
        ) from error


class _Loader(DataLoader[Data]):
    """Blocks signals while workers start: a worker does not yet ignore them then."""

    def _get_iterator(self) -> Any:
        return _Batches(self) if self.num_workers else super()._get_iterator()

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        with signals_blocked():
            return super().__iter__()


def _start_worker(worker_id: int) -> None:
    ignore_signals()
    # A handler runs between two bytecodes, so never during the creation of a shared-memory file.
    signal.signal(signal.SIGUSR2, lambda *_: os._exit(0))
    end_with_parent()
    torch.set_num_threads(1)


def _end_workers() -> None:
    """End the workers of this process at its exit.

    multiprocessing alone would hang: it sends SIGTERM, which workers ignore, and then joins them
    without a timeout.
    """
    workers = [child for child in multiprocessing.active_children() if child.daemon]
    for worker in workers:
        if worker.pid:
            os.kill(worker.pid, signal.SIGUSR2)
    for worker in workers:
        worker.join(SECONDS_TO_EXIT)
        worker.kill()


def _raise_open_files_limit() -> None:
    # Every tensor that a worker sends holds a file descriptor open.
    import resource  # Windows has none, where `pointup evaluate` imports this module.

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
