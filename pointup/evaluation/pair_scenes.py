"""Scenes of the viewer for pairs: source, baseline, output and target, from the worst pair on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor
from torch_geometric.data import Batch

from pointup.evaluation.pairs import clouds_of_pairs, upsampled_pairs
from pointup.model.upsampler import Upsampler
from pointup.visualization.viewer import Scene, compare_with_reference

TITLES = {"source": "source", "midpoints": "midpoint baseline", "model": "model"}


def worst_to_best(scores: Sequence[float]) -> dict[str, int]:
    """Index of the pair with the highest score (the worst), with the median one and the lowest.

    Fewer than three pairs have fewer entries; scores that are not finite are left out.
    """
    order = [int(i) for i in np.argsort(scores)[::-1] if np.isfinite(scores[int(i)])]
    if len(order) < 3:
        return {"worst": order[0], "best": order[-1]} if len(order) == 2 else {"only": order[0]}
    return {"worst": order[0], "median": order[len(order) // 2], "best": order[-1]}


def scene_of_pair(
    batch: Batch,
    ratio: Tensor,
    upsampler: Upsampler | None,
    *,
    vertical: bool,
    as_written: bool = False,
    unit: str = "",
    name: str = "",
    note: str = "",
) -> Scene:
    """Source, midpoint baseline and output of a batch of one pair, coloured by error.

    ratio: (1,) of the model and the baseline. The reference is the target. `as_written`: the output
    is that of `pointup upsample`, else that of the network.
    """
    clouds = clouds_of_pairs(batch, ratio, None if as_written else upsampler)
    if upsampler is not None and as_written:
        clouds["model"] = upsampled_pairs(batch, ratio, upsampler, [vertical])
    shown = {
        title: clouds[row][0].detach().double().cpu().numpy()
        for row, title in TITLES.items()
        if row in clouds
    }
    target = batch.target.double().cpu().numpy()
    return compare_with_reference(
        shown, target, unit, "z" if vertical else "y", name=name, note=note, of="target"
    )
