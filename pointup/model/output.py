"""The output of the model on packed clouds.

Legend of shape suffixes:
    N points of all clouds   R candidates of a point   B clouds   M output points
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pointup.geometry.packed import (
    on_host,
    ptr_from_sizes,
    rows_of_clouds,
    sizes_from_ptr,
    to_device,
)


class UpsamplerOutput(NamedTuple):
    """Output of `Upsampler`; all tensors are packed, with clouds in the order of the input."""

    pos: Tensor
    """(M, 3) float32: exactly `round(ratio * N)` points per cloud."""
    ptr: Tensor
    """(B+1,) bounds of the clouds in `pos`."""
    parent: Tensor
    """(M,) int64: the input point that each output point was generated from."""
    candidates: Tensor
    """(sum of N * R, 3) float32: all children, before thinning."""
    candidates_ptr: Tensor
    """(B+1,) bounds of the clouds in `candidates`."""
    log_shares: Tensor
    """(N,) float32: logarithm of the predicted share of the cloud's output that has each input
    point as its nearest. Thinning in `Upsampler` follows it."""
    log_quotas: Tensor
    """(N,) float32: a second, more accurate prediction of these shares, which thinning in
    `Upsampler` does not use. `pointup upsample` distributes its new points by it."""

    gaps: Tensor
    """(N,) float32: mean distance of each input point to its four nearest others, 0 for none."""
    log_error: Tensor | None = None
    """(M,) float32: logarithm of the predicted distance of each output point to the target, in
    spacings of the target; None for a model without `predict_error`."""

    def of_clouds(self, clouds: Tensor, points: Tensor) -> UpsamplerOutput:
        """The output with its clouds in another order.

        clouds: (B,) int64 on the CPU, numbers of this output's clouds in the new order. points:
        (N,) int64 on the device, the new row of each of this output's input points.
        """
        device = self.pos.device

        def of_points(values: Tensor) -> Tensor:
            return torch.empty_like(values).index_copy(0, points, values)

        def reordered(ptr: Tensor) -> tuple[Tensor, Tensor]:
            ptr = on_host(ptr)
            new = to_device(ptr_from_sizes(sizes_from_ptr(ptr)[clouds]), device)
            return new, to_device(rows_of_clouds(ptr, clouds), device)

        ptr, rows = reordered(self.ptr)
        candidates_ptr, candidate_rows = reordered(self.candidates_ptr)
        return UpsamplerOutput(
            self.pos[rows],
            ptr,
            points[self.parent[rows]],
            self.candidates[candidate_rows],
            candidates_ptr,
            of_points(self.log_shares),
            of_points(self.log_quotas),
            of_points(self.gaps),
            None if self.log_error is None else self.log_error[rows],
        )
