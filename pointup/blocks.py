"""Work on many points a block at a time, so that what lies between input and output stays small."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_remember: ContextVar[Callable[[Callable[[], Tensor]], Tensor] | None] = ContextVar(
    "what a block remembers", default=None
)


def remembered(compute: Callable[[], Tensor]) -> Tensor:
    """`compute()`, which a block that is computed again takes from its first computation.

    For what is dear to compute and cheap to keep, inside the forward of an autograd function: it
    is a constant to automatic differentiation, and must draw no random numbers.
    """
    remember = _remember.get()
    return compute() if remember is None else remember(compute)


def in_blocks(
    function: Callable[..., Tensor],
    num_points: int,
    block_size: int,
    gathered: Sequence[tuple[Tensor, Tensor]] = (),
    rows: Sequence[Tensor] = (),
    parameters: Iterable[Tensor] = (),
    random: bool = False,
    recompute: bool = True,
) -> Tensor:
    """`function(block, *of_neighbors, *of_points)` on blocks of points, joined.

    `block` is the slice of points. For each (table, index) of `gathered` the function is given
    `table[index[block]]`, for each tensor of `rows` its rows of the block; what it returns has
    one row a point. Differentiable in tables, rows and `parameters`; whatever else the function
    uses is constant. With `recompute` the backward pass computes each block again: between the
    passes nothing is kept but what goes in and out and what is `remembered`, and both touch memory
    no larger than a block's.

    Shapes: tables (M, F), index (num_points, ...) int64, rows (num_points, ...), result
    (num_points, ...). `random` says that the function draws random numbers, which must be the
    same again.
    """
    tables, indices = [table for table, _ in gathered], [index for _, index in gathered]
    blocks = [
        slice(start, min(start + block_size, num_points))
        for start in range(0, num_points, block_size)
    ]
    counts = (len(tables), len(rows))
    joined: Tensor = _Blocks.apply(
        function, blocks, indices, counts, random, recompute, *tables, *rows, *parameters
    )
    return joined


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        function: Callable[..., Tensor],
        blocks: list[slice],
        indices: list[Tensor],
        counts: tuple[int, int],
        random: bool,
        recompute: bool,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.function, ctx.blocks, ctx.indices, ctx.counts = function, blocks, indices, counts
        ctx.save_for_backward(*tensors)
        device = tensors[-1].device
        ctx.autocast = {
            "device_type": device.type,
            "dtype": torch.get_autocast_dtype(device.type),
            "enabled": torch.is_autocast_enabled(device.type),
            # A weight cast here, outside autograd, must not be found again where it is needed.
            "cache_enabled": False,
        }
        ctx.random_states, ctx.kept, ctx.remembered = [], {}, {}
        is_needed = any(ctx.needs_input_grad)
        keep = not recompute and is_needed
        joined = torch.empty(0)
        with torch.autocast(**ctx.autocast), torch.set_grad_enabled(keep):
            for number, block in enumerate(blocks):
                if random:
                    ctx.random_states.append(_random_state(device))
                inputs = _inputs_of(block, ctx, tensors)
                memory: list[Tensor] = []
                ctx.remembered[number] = memory
                with _recording(memory) if is_needed and recompute else nullcontext():
                    result = function(block, *inputs)
                if keep:
                    ctx.kept[number] = inputs, result
                    result = result.detach()
                if block.start == 0:
                    joined = result.new_empty((blocks[-1].stop, *result.shape[1:]))
                joined[block] = result
        return joined

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_joined: Tensor) -> Any:
        tensors, counts = ctx.saved_tensors, ctx.counts
        num_tables, num_inputs = counts[0], sum(counts)
        needed = ctx.needs_input_grad[-len(tensors) :]
        grads = [
            torch.zeros_like(tensor) if need else None
            for tensor, need in zip(tensors, needed, strict=True)
        ]
        wanted = [position for position, need in enumerate(needed) if need]
        device = tensors[-1].device
        for number, block in enumerate(ctx.blocks):
            inputs, result = ctx.kept.pop(number, (None, None))
            if result is None:
                state = ctx.random_states[number] if ctx.random_states else None
                inputs = _inputs_of(block, ctx, tensors)
                with (
                    _replayed(state, device),
                    _recalling(ctx.remembered.pop(number)),
                    torch.enable_grad(),
                    torch.autocast(**ctx.autocast),
                ):
                    result = ctx.function(block, *inputs)
            sources = [*inputs, *tensors[num_inputs:]]
            found = torch.autograd.grad(
                result, [sources[i] for i in wanted], grad_joined[block], allow_unused=True
            )
            for position, grad in zip(wanted, found, strict=True):
                total = grads[position]
                if grad is None or total is None:
                    continue
                if position < num_tables:
                    index = ctx.indices[position][block].flatten()
                    total.index_add_(0, index, grad.flatten(0, -2))
                elif position < num_inputs:
                    total[block] = grad
                else:
                    total += grad
        return None, None, None, None, None, None, *grads


def points_per_block(device: torch.device) -> int:
    """Points, or children, that are worked on at a time.

    On the CPU their tensors stay in the cache; elsewhere they only have to bound the memory.
    """
    return 8192 if device.type == "cpu" else 1 << 17


def children_kept(device: torch.device) -> int:
    """Most children in a batch whose intermediate values are kept for the backward pass.

    About 1 GB on the CPU, 4 GB elsewhere; larger batches compute them twice, up to a fifth slower.
    """
    return 1 << 16 if device.type == "cpu" else 1 << 18


@contextmanager
def _recording(memory: list[Tensor]) -> Iterator[None]:
    """Inside, what is `remembered` is put into the memory."""

    def remember(compute: Callable[[], Tensor]) -> Tensor:
        value = compute()
        memory.append(value.detach())
        return value

    token = _remember.set(remember)
    try:
        yield
    finally:
        _remember.reset(token)


@contextmanager
def _recalling(memory: list[Tensor]) -> Iterator[None]:
    """Inside, what is `remembered` comes from the memory, in the order in which it came there."""
    values = iter(memory)
    token = _remember.set(lambda compute: next(values))
    try:
        yield
    finally:
        _remember.reset(token)


def _inputs_of(block: slice, ctx: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
    """What the function is given of each block, as the leaves of a graph of its own."""
    num_tables, num_rows = ctx.counts
    gathered = [
        table.detach().index_select(0, index[block].flatten()).view(*index[block].shape, -1)
        for table, index in zip(tensors[:num_tables], ctx.indices, strict=True)
    ]
    of_points = [rows[block].detach() for rows in tensors[num_tables : num_tables + num_rows]]
    needed = ctx.needs_input_grad[-len(tensors) :]
    return [
        values.requires_grad_(need)
        for values, need in zip([*gathered, *of_points], needed, strict=False)
    ]


def _random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), on_device


def _replayed(state: tuple[Tensor, Tensor | None] | None, device: torch.device) -> Any:
    """The random numbers that came after `state`; those of the caller go on as if undrawn."""
    if state is None:
        return nullcontext()
    return _Replay(state, device)


class _Replay:
    def __init__(self, state: tuple[Tensor, Tensor | None], device: torch.device) -> None:
        self.state, self.device = state, device

    def __enter__(self) -> None:
        self.outside = _random_state(self.device)
        self._set(self.state)

    def __exit__(self, *exception: object) -> None:
        self._set(self.outside)

    def _set(self, state: tuple[Tensor, Tensor | None]) -> None:
        torch.set_rng_state(state[0])
        if state[1] is not None:
            torch.cuda.set_rng_state(state[1], self.device)
