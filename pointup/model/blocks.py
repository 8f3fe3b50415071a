"""Runs a function on blocks of points, with gradients, to bound the memory of intermediates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class Block:
    """Points that are processed together, and the slots of each that are processed."""

    points: slice | Tensor
    """Rows of the points: a slice, or their indices (n,) int64."""
    slots: Tensor | None = None
    """(n, r) int64, numbers of slots, where `points` are indices; None stands for all R slots."""

    def of_points(self, values: Tensor) -> Tensor:
        """The rows (n, ...) of `values` (N, ...)."""
        return values[self.points]

    def of_slots(self, values: Tensor) -> Tensor:
        """The slots (n, r, ...) of `values` (N, R, ...)."""
        if self.slots is None:
            return values[self.points]
        assert isinstance(self.points, Tensor)
        return values[self.points.unsqueeze(1), self.slots]


def in_blocks(
    function: Callable[..., Tensor],
    num_points: int,
    block_size: int,
    gathered: Sequence[tuple[Tensor, Tensor]] = (),
    gathered_by_slot: Sequence[tuple[Tensor, Tensor]] = (),
    rows: Sequence[Tensor] = (),
    parameters: Iterable[Tensor] = (),
    recompute: bool = True,
) -> Tensor:
    """Results of `function(block, *of_neighbors, *of_slots, *of_points)` on blocks of points.

    For each (table, index) of `gathered` and `gathered_by_slot` the function receives the block's
    part of `table[index]`, for each tensor of `rows` the block's rows. Differentiable in tables,
    rows and `parameters`; everything else that the function uses is constant.

    With `recompute` the backward pass computes each block again: only inputs and outputs are kept.
    On the CPU it skips slots without a gradient, about half of them; on other devices counting them
    would wait for the device. For this no slot may depend on the other slots of its point.

    Shapes: tables (M, F), index (N, K) and by slot (N, R) int64, rows (N, ...), result (N, ...) or
    (N, R, ...). Random numbers of the function, as of dropout, need `recompute` off.
    """
    pairs = [*gathered, *gathered_by_slot]
    tables, indices = [table for table, _ in pairs], [index for _, index in pairs]
    counts = (len(gathered), len(gathered_by_slot), len(rows))
    return _Blocks.apply(
        function,
        (num_points, block_size),
        indices,
        counts,
        # Without a backward pass nothing is kept. `apply` shows the function neither grad mode nor
        # inference mode, and says of weights that they need a gradient there too.
        recompute or not torch.is_grad_enabled(),
        *tables,
        *rows,
        *parameters,
    )


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        function: Callable[..., Tensor],
        extent: tuple[int, int],
        indices: list[Tensor],
        counts: tuple[int, int, int],
        recompute: bool,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.function, ctx.extent, ctx.indices, ctx.counts = function, extent, indices, counts
        ctx.save_for_backward(*tensors)
        ctx.kept = {}
        keep = not recompute and any(ctx.needs_input_grad)
        joined = torch.empty(0)
        blocks = _all_blocks(*extent)
        with torch.set_grad_enabled(keep):
            for number, block in enumerate(blocks):
                inputs = _inputs_of(block, ctx, tensors)
                result = function(block, *inputs)
                if keep:
                    ctx.kept[number] = inputs, result
                    result = result.detach()
                if len(blocks) == 1:
                    return result
                if number == 0:
                    joined = result.new_empty((extent[0], *result.shape[1:]))
                joined[block.points] = result
        return joined

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_joined: Tensor) -> Any:
        tensors = ctx.saved_tensors
        num_tables, num_inputs = sum(ctx.counts[:2]), sum(ctx.counts)
        needed = ctx.needs_input_grad[-len(tensors) :]
        grads: list[Tensor | None] = [None] * len(tensors)
        with_grad = [position for position, need in enumerate(needed) if need]
        blocks = _all_blocks(*ctx.extent)
        if ctx.counts[1] and not ctx.kept and tensors[-1].device.type == "cpu":
            blocks = _blocks_with_gradient(grad_joined, ctx.extent[1])
        for number, block in enumerate(blocks):
            inputs, result = ctx.kept.pop(number, (None, None))
            if result is None:
                inputs = _inputs_of(block, ctx, tensors)
                with torch.enable_grad():
                    result = ctx.function(block, *inputs)
            sources = [*inputs, *tensors[num_inputs:]]
            found = torch.autograd.grad(
                result,
                [sources[i] for i in with_grad],
                block.of_slots(grad_joined),
                allow_unused=True,
            )
            for position, grad in zip(with_grad, found, strict=True):
                if grad is None:
                    continue
                total = grads[position]
                if position < num_tables:
                    if total is None:
                        # About a dozen terms for each row, in float32 at least.
                        total = torch.zeros_like(tensors[position], dtype=_widened(grad))
                    index = _index_of(block, position, ctx).flatten()
                    grads[position] = total.index_add_(
                        0, index, grad.flatten(0, -2).to(total.dtype)
                    )
                elif position >= num_inputs:
                    grads[position] = grad if total is None else total.to(_widened(total)) + grad
                elif len(blocks) == 1 and isinstance(block.points, slice):
                    grads[position] = grad
                else:
                    if total is None:
                        total = grads[position] = torch.zeros_like(tensors[position])
                    total[block.points] = grad
        for position in with_grad:
            total, tensor = grads[position], tensors[position]
            if total is not None:
                grads[position] = total.to(tensor.dtype)
            elif not blocks:
                grads[position] = torch.zeros_like(tensor)
        return (*[None] * 5, *grads)


def _widened(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)


def _all_blocks(num_points: int, block_size: int) -> list[Block]:
    starts = range(0, num_points, block_size)
    return [Block(slice(start, min(start + block_size, num_points))) for start in starts]


def _blocks_with_gradient(grad: Tensor, block_size: int) -> list[Block]:
    """Blocks of mainly the slots with a nonzero gradient (N, R, ...), or of all if few are zero.

    Points are sorted by their number of such slots, descending. A block has as many slots per
    point as its first point needs, and as many children as `block_size` points with all slots:
    few blocks, because small ones cost more than they save.
    """
    num_slots = grad.shape[1]
    has_gradient = (grad != 0).flatten(2).any(2)
    num_with_gradient, points = has_gradient.sum(1).sort(descending=True, stable=True)
    slots = has_gradient.byte().argsort(dim=1, descending=True, stable=True)
    blocks = []
    work = start = 0
    while start < len(points) and (number := int(num_with_gradient[start])):
        part = points[start : start + block_size * num_slots // number]
        blocks.append(Block(part, slots[part, :number]))
        work += number * len(part)
        start += len(part)
    return blocks if work < 0.8 * len(points) * num_slots else _all_blocks(len(grad), block_size)


def points_per_block(device: torch.device) -> int:
    """Points per block.

    On the CPU their tensors fit in the cache, and are so small that `malloc` keeps their memory:
    the first write to new memory takes longer than most operations. On other devices they only
    bound the memory.
    """
    return 1024 if device.type == "cpu" else 1 << 17


def children_per_block(device: torch.device) -> int:
    """Children per block, as `points_per_block`. Another number changes the last digits of the
    children's positions."""
    return 8192 if device.type == "cpu" else 1 << 17


def children_kept(device: torch.device) -> int:
    """Most children of a batch whose intermediate values are kept for the backward pass.

    They take about 1 GB on the CPU, 4 GB elsewhere; larger batches compute them twice.
    """
    return 1 << 16 if device.type == "cpu" else 1 << 18


def _inputs_of(block: Block, ctx: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The function's inputs for a block, as leaves of a separate graph."""
    num_tables, num_inputs = sum(ctx.counts[:2]), sum(ctx.counts)
    gathered = []
    for position, table in enumerate(tensors[:num_tables]):
        index = _index_of(block, position, ctx)
        values = table.detach().index_select(0, index.flatten())
        gathered.append(values.view(*index.shape, -1))
    of_points = [block.of_points(rows).detach() for rows in tensors[num_tables:num_inputs]]
    needed = ctx.needs_input_grad[-len(tensors) :]
    return [
        values.requires_grad_(need)
        for values, need in zip([*gathered, *of_points], needed, strict=False)
    ]


def _index_of(block: Block, position: int, ctx: Any) -> Tensor:
    """The block's part of the index into the table at `position`."""
    part = block.of_slots if position >= ctx.counts[0] else block.of_points
    return part(ctx.indices[position])
