"""The figures of single clouds that training, `pointup evaluate pairs` and `... shapes` share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pointup.geometry.neighbors import nearest
from pointup.geometry.packed import batch_from_ptr, segment_max, segment_mean, sizes_from_ptr
from pointup.geometry.surfaces import Surface


@dataclass(frozen=True)
class Metric:
    """How a figure is printed: column title, unit ("" for none), and its convention in a line."""

    title: str
    unit: str
    convention: str


METRICS = {
    "chamfer": Metric(
        "Chamfer",
        "data unit",
        "mean distance of prediction to target + mean distance of target to prediction, "
        "not squared, as given",
    ),
    "hausdorff": Metric(
        "Hausdorff",
        "data unit",
        "largest distance of any point of either cloud to the other, not squared, as given",
    ),
    "cd": Metric(
        "CD",
        "x1e-3",
        "mean squared distance one way + the other way, each cloud normalised by its own mean "
        "and furthest distance",
    ),
    "hd": Metric(
        "HD",
        "x1e-3",
        "largest squared distance one way + the other way, each cloud normalised by its own mean "
        "and furthest distance",
    ),
    "p2f": Metric(
        "P2F",
        "x1e-3",
        "mean distance of the prediction to the true surface, not squared, as given",
    ),
}
"""Figures that `measure` gives; all are better the lower they are."""


@torch.no_grad()
def measure(
    pos: Tensor,
    ptr: Tensor,
    target: Tensor,
    target_ptr: Tensor,
    surfaces: Sequence[Surface | None] | None = None,
) -> list[dict[str, float]]:
    """The figures of `METRICS` for every predicted cloud, in the order of the clouds.

    "cd", "hd" and "p2f" are the field's (Qian et al., PU-GCN, 2021), times 1e3. "p2f" is there for
    clouds whose true surface is given, in the same coordinates. A cloud without points, on either
    side, has no figures: an empty dict.

    Shapes: `pos` (P, 3), `ptr` (B+1,), `target` (T, 3), `target_ptr` (B+1,), B `surfaces`.
    Raises ValueError for coordinates that are not finite.
    """
    forward, backward = _squared_distances(pos, ptr, target, target_ptr)
    own_forward, own_backward = _squared_distances(
        own_normalized(pos, ptr), ptr, own_normalized(target, target_ptr), target_ptr
    )
    figures = {
        "chamfer": segment_mean(forward.sqrt(), ptr) + segment_mean(backward.sqrt(), target_ptr),
        "hausdorff": torch.maximum(
            segment_max(forward, ptr), segment_max(backward, target_ptr)
        ).sqrt(),
        "cd": 1e3 * (segment_mean(own_forward, ptr) + segment_mean(own_backward, target_ptr)),
        "hd": 1e3 * (segment_max(own_forward, ptr) + segment_max(own_backward, target_ptr)),
    }
    columns = {name: values.tolist() for name, values in figures.items()}
    comparable = ((sizes_from_ptr(ptr) > 0) & (sizes_from_ptr(target_ptr) > 0)).tolist()
    bounds = ptr.tolist()
    measured: list[dict[str, float]] = []
    for cloud, has_points in enumerate(comparable):
        if not has_points:
            measured.append({})
            continue
        measured.append({name: column[cloud] for name, column in columns.items()})
        surface = surfaces[cloud] if surfaces is not None else None
        if surface is not None:
            points = pos[bounds[cloud] : bounds[cloud + 1]].cpu().numpy()
            measured[cloud]["p2f"] = 1e3 * float(surface.distance(points).mean())
    return measured


def own_normalized(pos: Tensor, ptr: Tensor) -> Tensor:
    """Each cloud centred on the mean of its points and scaled to furthest distance 1.

    The field's normalisation. Shapes: `pos` (N, 3) -> (N, 3). A cloud without extent is centred
    only.
    """
    batch = batch_from_ptr(ptr, len(pos))
    centred = pos - segment_mean(pos, ptr)[batch]
    furthest = segment_max(torch.linalg.vector_norm(centred, dim=1), ptr)
    return centred / torch.where(furthest > 0, furthest, 1.0)[batch].unsqueeze(1)


def _squared_distances(
    pos: Tensor, ptr: Tensor, target: Tensor, target_ptr: Tensor
) -> tuple[Tensor, Tensor]:
    """Of every point to the nearest of the other cloud, (P,) and (T,)."""
    return nearest(pos, ptr, target, target_ptr)[0], nearest(target, target_ptr, pos, ptr)[0]
