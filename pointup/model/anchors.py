"""Anchors: where the children of a point start, before the network moves them.

Legend of shape suffixes:
    N points of all clouds   n points that are processed   R slots (children) of each
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pointup.geometry.midpoints import depths_of_slots, is_extrapolated
from pointup.geometry.packed import to_device
from pointup.model.blocks import Block
from pointup.model.config import ModelConfig


@dataclass(frozen=True)
class Anchors:
    """Anchors of the R slots of n points.

    An anchor is half way to the neighbour of the slot; for extrapolated slots as far beyond the
    point, opposite to the neighbour; for slots that descend straight below the point.

    Attributes:
        pos: (n, R, 3) float32, position of the anchor.
        direction: (n, R, 3) float32, twice the vector from the point to the anchor, in spacings of
            the point: the vector to the neighbour. Compressed for slots that descend, because the
            network knows offsets of a few spacings.
        is_beyond: (n, R, 1) bool, whether the slot is extrapolated; None without `extrapolation`.
        is_below: (n, R, 1) bool, whether the slot descends; None without `descent`.
        depth: (n, R, 1) float32, depth below the point in spacings, 0 for other slots; None without
            `descent`.
    """

    pos: Tensor
    direction: Tensor
    is_beyond: Tensor | None = None
    is_below: Tensor | None = None
    depth: Tensor | None = None

    def of_block(self, block: Block) -> Anchors:
        """The anchors of a block of points and slots."""
        beyond, below, depth = (
            None if values is None else block.of_slots(values)
            for values in (self.is_beyond, self.is_below, self.depth)
        )
        pos, direction = block.of_slots(self.pos), block.of_slots(self.direction)
        return Anchors(pos, direction, beyond, below, depth)


def anchors_of_slots(
    config: ModelConfig,
    pos: Tensor,
    rows: slice,
    slot_neighbor: Tensor,
    spacing: Tensor,
    drop: Tensor | None,
) -> Anchors:
    """Anchors of the slots of the points in `rows`.

    Shapes: `pos` (N, 3), `slot_neighbor` (n, R) the neighbour that each slot is tied to, `spacing`
    (n, 1), `drop` (N, 1) the largest depth of slots that descend, None for a model without
    `descent`.
    """
    assert (drop is not None) == config.descent
    num_points, num_slots = slot_neighbor.shape
    own, others = pos[rows].unsqueeze(1), pos[slot_neighbor]
    anchor, direction = (own + others) * 0.5, (others - own) / spacing.unsqueeze(1)
    is_beyond = is_below = depth = None
    if config.extrapolation:
        of_slots = to_device(is_extrapolated(num_slots, config.extrapolation), pos.device)
        is_beyond = of_slots.view(1, -1, 1).expand(num_points, -1, 1)
        anchor = torch.where(is_beyond, 1.5 * own - 0.5 * others, anchor)
        direction = torch.where(is_beyond, -direction, direction)
    if drop is not None:
        shares = to_device(depths_of_slots(num_slots), pos.device)
        depth = (shares * (drop[rows] / spacing)).unsqueeze(2)
        is_below = (shares > 0).view(1, -1, 1).expand(num_points, -1, 1)
        down = torch.zeros_like(pos[0])
        down[2] = -1.0
        anchor = torch.where(is_below, own + depth * spacing.unsqueeze(1) * down, anchor)
        direction = torch.where(is_below, 2 * depth.asinh() * down, direction)
    return Anchors(anchor, direction, is_beyond, is_below, depth)
