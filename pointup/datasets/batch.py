"""Packs samples into one PyG batch; the loader whose workers do it ahead of the training loop."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch_geometric.data import Batch, Data

from pointup.datasets.pair_dataset import PairDataset
from pointup.geometry.packed import batch_from_ptr, ptr_from_sizes, to_device

CPU = torch.device("cpu")
PINNED_FOR = ("cuda", "xpu")
MAX_OPEN_FILES = 65536
SECONDS_TO_END = 5.0
UNHEARD = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)


def collate(samples: Sequence[Data]) -> Batch:
    """Samples of a `PairDataset` as one batch, points copied one cloud after another.

    The batch has `pos` (N, 3), `batch` (N,), `ptr` (B + 1,), likewise `target`, `target_batch`,
    `target_ptr`, and `name` (list of B), `index` (B,) int64. `target_normals` (M, 3) and
    `resample` (K, 3) with `resample_ptr` are there when any sample has them: a sample without has
    zeros for normals and no points of `resample`, so that what becomes of a cloud does not depend
    on the others in its batch. No samples make an empty batch. `seconds` tells how long each stage
    took that made the batch.
    """
    began = time.perf_counter()
    pos, ptr = _pack([sample.pos for sample in samples])
    target, target_ptr = _pack([sample.target for sample in samples])
    # Built without `Batch.from_data_list`: PyG would shift every attribute named like an index.
    batch = Batch(
        pos=pos,
        batch=batch_from_ptr(ptr, len(pos)),
        ptr=ptr,
        target=target,
        target_batch=batch_from_ptr(target_ptr, len(target)),
        target_ptr=target_ptr,
        name=[sample.name for sample in samples],
        index=torch.tensor([sample.index for sample in samples], dtype=torch.int64),
    )
    if any("target_normals" in sample for sample in samples):
        batch.target_normals = torch.cat(
            [
                sample.target_normals
                if "target_normals" in sample
                else torch.zeros_like(sample.target)
                for sample in samples
            ]
        )
    if any("resample" in sample for sample in samples):
        nothing = torch.empty((0, 3))
        batch.resample, batch.resample_ptr = _pack(
            [sample.resample if "resample" in sample else nothing for sample in samples]
        )
    seconds = sum((Counter(sample.get("seconds", {})) for sample in samples), Counter())
    batch.seconds = {**seconds, "packing": time.perf_counter() - began}
    return batch


def move(batch: Batch, device: torch.device) -> Batch:
    """The batch on the device, with the bounds of its clouds known on the host as well."""
    bounds = {name: batch[name] for name in ("ptr", "target_ptr", "resample_ptr") if name in batch}
    batch = batch.to(device, non_blocking=True)
    for name, ptr in bounds.items():
        batch[name] = to_device(ptr, device)
    return batch


def _pack(clouds: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    ptr = ptr_from_sizes(torch.tensor([len(cloud) for cloud in clouds], dtype=torch.int64))
    return torch.cat([torch.empty((0, 3)), *clouds]), ptr


def make_loader(
    dataset: PairDataset,
    batch_sampler: Iterable[list[tuple[int, int]]],
    num_workers: int = 0,
    timeout: float = 300.0,
    device: torch.device = CPU,
) -> DataLoader[Data]:
    """A loader of collated batches, in the order of the batch sampler.

    Workers persist over the epochs, and are deaf to Ctrl-C, SIGTERM and SIGHUP, which come to
    the whole process group: the training process decides when they end. `timeout` is how many
    seconds a batch may take before the loader raises RuntimeError; it counts with workers only.
    Batches for a GPU come in pinned memory, from where they are copied without a wait.
    """
    if num_workers:
        _raise_open_files_limit()
        # Registering twice would run it twice.
        atexit.unregister(_end_workers)
        atexit.register(_end_workers)
    return _Loader(
        dataset,
        batch_sampler=batch_sampler,
        collate_fn=collate,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        pin_memory=device.type in PINNED_FOR,
        timeout=timeout if num_workers else 0,
        worker_init_fn=_start_worker,
    )


class _Loader(DataLoader[Data]):
    """Starts workers with the signals held back that would end one before it is deaf to them."""

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        if not hasattr(signal, "pthread_sigmask"):  # Windows
            return super().__iter__()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, UNHEARD)
        try:
            return super().__iter__()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _start_worker(worker_id: int) -> None:
    for number in UNHEARD:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, UNHEARD)
    if hasattr(signal, "SIGUSR2"):
        # Ends between two bytecodes, never while a shared-memory file is being made.
        signal.signal(signal.SIGUSR2, lambda *_: os._exit(0))
    torch.set_num_threads(1)


def _end_workers() -> None:
    """Ends this process's workers at its exit, where multiprocessing would wait for ever.

    Its own last call is SIGTERM, which workers ignore, and then a join without a timeout.
    """
    workers = [child for child in multiprocessing.active_children() if child.daemon]
    for worker in workers:
        if hasattr(signal, "SIGUSR2") and worker.pid:
            os.kill(worker.pid, signal.SIGUSR2)
    for worker in workers:
        worker.join(SECONDS_TO_END)
        worker.kill()


def _raise_open_files_limit() -> None:
    # Every tensor on its way from a worker holds a file open.
    try:
        import resource
    except ImportError:  # Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
