"""What the model makes of packed clouds.

Legend of shape suffixes:
    N points of all clouds   R candidates of a point   B clouds   M output points
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Upsampled(NamedTuple):
    """What `Upsampler` returns; everything packed, clouds in the order of the input."""

    pos: Tensor
    """(M, 3) float32: exactly `round(ratio * N)` points a cloud."""
    ptr: Tensor
    """(B+1,) borders of the clouds in `pos`."""
    parent: Tensor
    """(M,) int64: the input point that each output point was made from."""
    candidates: Tensor
    """(sum of N * R, 3) float32: all children, before thinning."""
    candidates_ptr: Tensor
    """(B+1,) borders of the clouds in `candidates`."""
    log_shares: Tensor
    """(N,) float32: logarithm of the share of its cloud's output that each input point should
    have nearest to it, as predicted; thinning follows it."""
    log_quotas: Tensor
    """(N,) float32: the same, predicted better, but only once a cloud is made; `pointup upsample`
    shares out its new points by it."""
