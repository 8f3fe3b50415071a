"""The candidates of the upsampler, before thinning, alone or beside the points of the input.

Legend of shape suffixes:
    N points of all clouds   M candidates of all clouds   B clouds
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pointup.geometry.adaptive_thinning import sample_by_spacing
from pointup.geometry.neighbors import nearest
from pointup.geometry.packed import batch_from_ptr, on_host, to_device


class Candidates(NamedTuple):
    """Packed candidates, cloud after cloud."""

    pos: Tensor
    """(M, 3) float32."""
    ptr: Tensor
    """(B+1,) bounds of the clouds."""
    parent: Tensor
    """(M,) int64: the input point that each candidate belongs to."""
    log_spacing: Tensor
    """(M,) float32: logarithm of the spacing of the output at each candidate, in any unit; -inf for
    points that are kept in any case."""
    log_error: Tensor | None
    """(M,) float32: logarithm of the predicted error; None for a model without it."""
    distance: Tensor | None = None
    """(M,) float32: distance to the nearest point that is kept in any case, inf for these points
    themselves; None without such points."""

    @property
    def is_new(self) -> Tensor | None:
        """(M,) bool: whether each is a child; None without points that are kept in any case."""
        return None if self.distance is None else self.distance.isfinite()

    def beside(self, pos: Tensor, ptr: Tensor) -> Candidates:
        """The candidates of each cloud after the points (N, 3) of its input, which are kept."""
        squared, _ = nearest(self.pos.detach(), self.ptr, pos, ptr)
        clouds = torch.cat([batch_from_ptr(ptr, len(pos)), batch_from_ptr(self.ptr, len(self.pos))])
        order = clouds.argsort(stable=True)

        def joined(of_input: Tensor, of_candidates: Tensor) -> Tensor:
            return torch.cat([of_input, of_candidates])[order]

        kept = self.log_spacing.new_full((len(pos),), torch.inf)
        rows = torch.arange(len(pos), device=pos.device)
        log_error = self.log_error
        return Candidates(
            joined(pos, self.pos),
            to_device(on_host(ptr) + on_host(self.ptr), ptr.device),
            joined(rows, self.parent),
            joined(-kept, self.log_spacing),
            None if log_error is None else joined(log_error.new_zeros(len(pos)), log_error),
            joined(kept, squared.sqrt()),
        )

    def thinned(self, num_kept: Tensor) -> Tensor:
        """Index of the `num_kept` (B,) candidates of each cloud that thinning keeps."""
        return sample_by_spacing(
            self.pos.detach(), self.ptr, num_kept, self.log_spacing, self.distance
        )
