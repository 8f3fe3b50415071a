"""Handles out-of-memory errors in a micro-batch: splits it in halves, with the same gradient."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator

import torch
from accelerate.utils.memory import should_reduce_batch_size
from torch import Tensor
from torch_geometric.data import Batch

from pointup.datasets.batch import num_tokens
from pointup.errors import OUT_OF_MEMORY, TrainingError
from pointup.training.distributed.accelerator import release_cached_memory

logger = logging.getLogger("pointup")


def in_pieces(
    batch: Batch, work: Callable[[Batch], Tensor], drop_gradients: Callable[[], None]
) -> Iterator[tuple[Batch, Tensor]]:
    """Run `work`, forward and backward, on a batch; yields each processed part and its losses.

    After an out-of-memory error this calls `drop_gradients` once and splits the part in halves,
    recursively if necessary. The losses of single clouds are summed, so the gradient is the same,
    and other processes are not affected. Only dropout differs: each part draws numbers of its own.
    Raises TrainingError, naming the cloud, if a single cloud is too large.
    """
    pieces = [batch]
    while pieces:
        piece = pieces.pop()
        losses = attempt(work, piece)
        if losses is not None:
            yield piece, losses
            continue
        # Outside the except block, the tensors of the failed attempt are released.
        drop_gradients()
        gc.collect()
        release_cached_memory()
        if piece.num_graphs < 2:
            raise TrainingError(
                f"{piece.name[0]}: out of memory with this cloud alone, of {num_tokens(piece)} "
                "points; lower --token-budget and give --crop"
            )
        logger.warning(
            "out of memory with %d clouds of %d points: done again in halves",
            piece.num_graphs, num_tokens(piece),
        )  # fmt: skip
        pieces += reversed(halves(piece))


def attempt(work: Callable[[Batch], Tensor], batch: Batch) -> Tensor | None:
    """The result of `work`; None if it runs out of memory."""
    try:
        return work(batch)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    return None


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether the error is an out-of-memory error of torch's allocator, the driver or a library."""
    is_known = isinstance(error, torch.OutOfMemoryError) or should_reduce_batch_size(error)
    return is_known or OUT_OF_MEMORY.search(str(error)) is not None


def halves(batch: Batch) -> list[Batch]:
    """Split a batch of two or more clouds into two, with about the same number of tokens."""
    tokens = (batch.ptr + batch.target_ptr).cpu()
    middle = int((2 * tokens - tokens[-1]).abs()[1:-1].argmin()) + 1
    return [clouds(batch, 0, middle), clouds(batch, middle, batch.num_graphs)]


def clouds(batch: Batch, start: int, stop: int) -> Batch:
    """Clouds `start` to `stop` of a batch."""
    part = Batch(name=batch.name[start:stop], index=batch.index[start:stop])
    for points, ptr_name, others in (
        ("pos", "ptr", ("batch",)),
        ("target", "target_ptr", ("target_batch", "target_normals")),
        ("resample", "resample_ptr", ()),
    ):
        if points not in batch:
            continue
        ptr = batch[ptr_name]
        rows = slice(int(ptr[start]), int(ptr[stop]))
        part[ptr_name] = ptr[start : stop + 1] - ptr[start]
        for name in (points, *others):
            if name in batch:
                part[name] = batch[name][rows] - (start if name.endswith("batch") else 0)
    return part
