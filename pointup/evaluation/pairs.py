"""Pairs of a batch: the model, and beside it the baseline, the raw source and the floor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch_geometric.data import Batch

from pointup.evaluation.measures import Figures, measure
from pointup.geometry.midpoints import midpoint_upsample
from pointup.geometry.surfaces import Surface
from pointup.model import Upsampler

ROWS = {
    "model": "model",
    "midpoints": "midpoints (no network)",
    "source": "source as it is",
    "floor": "floor (sampled again)",
}
"""What is measured against the target, and how it is printed."""


@torch.no_grad()
def measure_pairs(
    batch: Batch,
    ratio: Tensor,
    upsampler: Upsampler | None = None,
    surfaces: Sequence[Surface | None] | None = None,
) -> list[dict[str, Figures]]:
    """For every pair of a batch, figures of those of `ROWS` that it has, as `measure` gives them.

    `batch`: as `collate` makes it, on the device of the model. `ratio`: (B,) by which model and
    midpoints upsample. The floor is there for pairs with a second sampling.
    """
    clouds = {
        "midpoints": midpoint_upsample(batch.pos, batch.ptr, ratio),
        "source": (batch.pos, batch.ptr),
    }
    if upsampler is not None:
        output = upsampler(batch.pos, batch.ptr, ratio)
        clouds = {"model": (output.pos, output.ptr), **clouds}
    if "resample" in batch:
        clouds["floor"] = (batch.resample, batch.resample_ptr)
    rows = {
        row: measure(pos, ptr, batch.target, batch.target_ptr, surfaces)
        for row, (pos, ptr) in clouds.items()
    }
    return [
        {row: figures[pair] for row, figures in rows.items() if figures[pair]}
        for pair in range(batch.num_graphs)
    ]
