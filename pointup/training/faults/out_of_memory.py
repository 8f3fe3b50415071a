"""Out of memory in a micro-batch: done again in halves, with the same gradient."""

from __future__ import annotations

import gc
import logging
import re
from collections.abc import Callable, Iterator

import torch
from accelerate.utils.memory import should_reduce_batch_size
from torch import Tensor
from torch_geometric.data import Batch

from pointup.errors import TrainingError
from pointup.training.distributed.devices import release_cached_memory

logger = logging.getLogger("pointup")

# "CUDA error: out of memory", "Triton Error [CUDA]: out of memory", CUBLAS_STATUS_ALLOC_FAILED.
OUT_OF_MEMORY = re.compile(r"\bout of memory\b|_STATUS_ALLOC_FAILED\b", re.IGNORECASE)


def in_pieces(
    batch: Batch, work: Callable[[Batch], Tensor], forget: Callable[[], None]
) -> Iterator[tuple[Batch, Tensor]]:
    """Do `work`, forward and backward, on a batch; yields what was done and its losses.

    What runs out of memory is forgotten, by `forget`, called once each time, and done again in two
    halves, and these in halves where need be. The losses of single clouds are summed, so the
    gradient is the same, and no other process needs to know. Raises TrainingError, naming it, for
    a cloud that is too large by itself.
    """
    pieces = [batch]
    while pieces:
        piece = pieces.pop()
        losses = attempt(work, piece)
        if losses is not None:
            yield piece, losses
            continue
        # Here, outside the except block, the failed attempt's tensors are no longer held.
        forget()
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
    """What `work` returns, or None where the memory doesn't suffice."""
    try:
        return work(batch)
    except RuntimeError as error:
        if is_out_of_memory(error):
            return None
        raise


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether memory ran out, whoever asked for it: torch's allocator, the driver, a library."""
    if isinstance(error, torch.OutOfMemoryError) or should_reduce_batch_size(error):
        return True
    return OUT_OF_MEMORY.search(str(error)) is not None


def num_tokens(batch: Batch) -> int:
    """Points of source and target together."""
    return len(batch.pos) + len(batch.target)


def halves(batch: Batch) -> list[Batch]:
    """A batch of two or more clouds as two, of about as many tokens each."""
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
