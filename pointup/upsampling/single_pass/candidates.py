"""Candidates for new points: what the model makes of a part of the cloud, as if it saw it whole."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from pointup.errors import ConfigError, ModelError
from pointup.geometry.gaps import without_bridges
from pointup.geometry.local_geometry import REACH, LocalGeometry, local_geometry
from pointup.model.upsampler import Upsampler
from pointup.upsampling.single_pass.reach import SLACK
from pointup.upsampling.store.region import Region

# Passes of a mean over the neighbours that make the spacing of points smooth.
_SMOOTHING = 2


@dataclass(frozen=True)
class Candidates:
    """Children of N points, R of them a point, in the order of the points.

    A child out of reach, or across a gap, takes its parent's place: a copy is chosen last.

    Attributes:
        num_slots: (N,) int64, how many children each point has; together they are M.
        offset: (M, 3) float32, from the parent to the child.
        distance: (M,) float32, to the nearest of the parent's neighbours and the parent itself.
        spacing: (N,) float32, distance between points around each parent.
        reach: (N,) float32, how far from each parent new points may lie.
        quota: (N,) float32, logarithm of the part of all new points that each parent is to have,
            up to a constant of the cloud.
    """

    num_slots: np.ndarray
    offset: np.ndarray
    distance: np.ndarray
    spacing: np.ndarray
    reach: np.ndarray
    quota: np.ndarray

    @property
    def parent(self) -> np.ndarray:
        """(M,) int64, the row of each child's parent."""
        return np.repeat(np.arange(len(self.num_slots)), self.num_slots)

    @property
    def slot(self) -> np.ndarray:
        """(M,) int64, the number of each child among its parent's."""
        first = np.cumsum(self.num_slots) - self.num_slots
        return np.arange(len(self.offset)) - first[self.parent]

    def rows(self, start: int, stop: int) -> Candidates:
        """The children of some of the points."""
        ptr = np.append(0, np.cumsum(self.num_slots))
        children = slice(ptr[start], ptr[stop])
        return Candidates(
            self.num_slots[start:stop],
            self.offset[children],
            self.distance[children],
            self.spacing[start:stop],
            self.reach[start:stop],
            self.quota[start:stop],
        )

    def copies(self, rejected: np.ndarray) -> Candidates:
        """The same with copies of their parents in place of the rejected (M,) children."""
        return replace(
            self,
            offset=np.where(rejected[:, None], np.float32(0), self.offset),
            distance=np.where(rejected, np.float32(0), self.distance),
        )


@dataclass(frozen=True)
class Neighborhood:
    """Points with all others that their children depend on.

    Attributes:
        pos: (N, 3) float32, the points themselves first.
        index: (N, K) int64 neighbours, each point itself first; -1 where they don't matter.
        squared: (N, K) float32 squared distances.
        slot_index: (C, R) int64, what the slots of the first C points are tied to.
        places: (N,) int64, where the points stand in the region.
    """

    pos: np.ndarray
    index: np.ndarray
    squared: np.ndarray
    slot_index: np.ndarray
    places: np.ndarray


def gather_neighborhood(
    region: Region, core: np.ndarray, k: int, num_slots: int, num_hops: int
) -> Neighborhood:
    """Everything within `num_hops` steps from point to neighbour of the points at places `core`."""
    of_slots = region.neighbors_of(core, max(k, num_slots))
    frontier, found = core, [(of_slots[0][:, :k], of_slots[1][:, :k])]
    reached, touched = core, of_slots[1]
    for _ in range(num_hops - 1):
        frontier = np.setdiff1d(touched[touched >= 0], reached)
        reached = np.concatenate([reached, frontier])
        found.append(region.neighbors_of(frontier, k))
        touched = found[-1][1]
    # Of the last ones, only the positions matter.
    frontier = np.setdiff1d(touched[touched >= 0], reached)
    reached = np.concatenate([reached, frontier])

    place = np.full(len(region) + 1, -1, dtype=np.int64)
    place[reached] = np.arange(len(reached))
    index = np.full((len(reached), k), -1, dtype=np.int64)
    squared = np.full((len(reached), k), np.inf, dtype=np.float32)
    index[:, 0], squared[:, 0] = np.arange(len(reached)), 0.0
    num_known = len(reached) - len(frontier)
    index[:num_known] = place[np.concatenate([places for _, places in found])]
    squared[:num_known] = np.square(np.concatenate([distance for distance, _ in found]))
    positions = region.rows["position"][reached]
    # Centred in float64: neighbours are then exact differences in float32.
    centre = (positions.min(axis=0) + positions.max(axis=0)) / 2
    pos = (positions - centre).astype(np.float32)
    return Neighborhood(pos, index, squared, place[of_slots[1][:, :num_slots]], reached)


def num_hops(model: Upsampler) -> int:
    """Steps from point to neighbour that the children of a point depend on.

    One for the features of their parent's neighbours, one for each layer, one for the neighbours
    that the first features describe, and one for the spacing there.
    """
    return model.config.num_layers + 3


def make_candidates(
    model: Upsampler,
    region: Region,
    core: np.ndarray,
    num_slots: np.ndarray,
    device: torch.device,
    children_per_call: int,
    turn: AbstractContextManager[object],
) -> Candidates:
    """Children of the points at places `core` in the region, `num_slots` (C,) of each.

    The device is used within `turn`. In a later pass the points of the region say by their
    attribute `SLACK` how far from each of them children may lie; in the first one that is `REACH`
    times their local spacing. Raises ModelError when the model makes coordinates that are not
    finite, ConfigError when the device has too little memory.
    """
    if not num_slots.any():
        nothing = np.empty((0, 3), dtype=np.float32)
        ones = np.ones(len(core), dtype=np.float32)
        reach = _reach(region, core, model.config.k + 1)
        return Candidates(num_slots, nothing, nothing[:, 0], ones, reach, 0 * ones)
    # Points with the same number of slots one after another.
    order = np.argsort(num_slots, kind="stable")
    near = gather_neighborhood(
        region, core[order], model.config.k + 1, int(num_slots.max()), num_hops(model)
    )
    slack = None
    if SLACK in (region.rows["attributes"].dtype.names or ()):
        slack = region.rows["attributes"][SLACK][near.places]
    try:
        with turn:
            offset, distance, *of_parents = _run(
                model, near, num_slots[order], slack, device, children_per_call
            )
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"{device} has too little memory for {len(near.pos)} points at a time; lower "
            "--token-budget"
        ) from error
    for made in (offset, *of_parents):
        if not np.isfinite(made).all():
            raise ModelError("the model makes numbers that are not finite; train it again")
    back = np.argsort(np.repeat(order, num_slots[order]), kind="stable")
    place = np.argsort(order)
    return Candidates(num_slots, offset[back], distance[back], *(v[place] for v in of_parents))


def _reach(region: Region, core: np.ndarray, k: int) -> np.ndarray:
    """How far (C,) from each of the points at places `core` new points may lie."""
    near = gather_neighborhood(region, core, k, 0, num_hops=2)
    pos, index, squared = map(torch.from_numpy, (near.pos, near.index, near.squared))
    geometry = local_geometry(pos, torch.tensor([0, len(pos)]), squared, index)
    reach: np.ndarray = (REACH * geometry.local_spacing[: len(core), 0]).numpy()
    return reach


@torch.inference_mode()
def _run(
    model: Upsampler,
    near: Neighborhood,
    num_slots: np.ndarray,
    slack: np.ndarray | None,
    device: torch.device,
    children_per_call: int,
) -> tuple[np.ndarray, ...]:
    """Offset and distance of the children, smooth spacing, reach and quota of their parents."""
    pos, index, squared, slot_index = (
        torch.from_numpy(values).to(device)
        for values in (near.pos, near.index, near.squared, near.slot_index)
    )
    geometry = local_geometry(pos, torch.tensor([0, len(pos)], device=device), squared, index)
    features, g = model.encode(geometry)
    normals = model.turn_normals(features, g, geometry)
    tables = model.child_tables(features)
    reach = REACH * geometry.local_spacing[:, 0]
    if slack is not None:
        reach = torch.from_numpy(slack).to(device)
    spacing = geometry.spacing
    for _ in range(_SMOOTHING):
        spacing = spacing[geometry.index].mean(1)
    offsets, distances = [], []
    for rows, slots in _calls(num_slots, children_per_call):
        index = without_bridges(slot_index[rows, :slots], rows, pos, geometry.local_spacing)
        children = model.place_children(pos, rows, index, tables, g, normals, geometry)
        offset = children - pos[rows].unsqueeze(1)
        distance, is_near = _distance_to_points(offset, rows, slot_index, pos, reach, geometry)
        # NaN is in nobody's reach, and is to be seen.
        is_copy = (index < 0) | (~is_near & offset.isfinite().all(-1))
        offsets.append(offset.masked_fill(is_copy.unsqueeze(-1), 0.0).flatten(0, 1).cpu())
        distances.append(distance.masked_fill(is_copy, 0.0).flatten().cpu())
    quota = model.quota_logits(features, geometry)
    of_parents = (values[: len(num_slots)].cpu() for values in (spacing[:, 0], reach, quota))
    return tuple(
        values.numpy() for values in (torch.cat(offsets), torch.cat(distances), *of_parents)
    )


def _calls(num_slots: np.ndarray, children_per_call: int) -> list[tuple[slice, int]]:
    """Runs of points with equal numbers of slots, none of them 0, of limited size."""
    calls = []
    values, starts = np.unique(num_slots, return_index=True)
    for slots, start, stop in zip(
        values.tolist(), starts.tolist(), [*starts[1:].tolist(), len(num_slots)], strict=True
    ):
        if slots:
            step = max(1, children_per_call // slots)
            calls += [(slice(i, min(i + step, stop)), slots) for i in range(start, stop, step)]
    return calls


def _distance_to_points(
    offset: Tensor,
    rows: slice,
    slot_index: Tensor,
    pos: Tensor,
    reach: Tensor,
    geometry: LocalGeometry,
) -> tuple[Tensor, Tensor]:
    """Distance (n, R) of children to the nearest point that their parent knows, and whether that is
    within the reach of the point."""
    wide = slot_index if slot_index.shape[1] > geometry.index.shape[1] else geometry.index
    own = torch.arange(rows.start, rows.stop, device=pos.device).unsqueeze(1)
    known = torch.where(wide[rows] < 0, own, wide[rows])
    relative = pos[known] - pos[rows].unsqueeze(1)
    gap = torch.linalg.vector_norm(offset.unsqueeze(2) - relative.unsqueeze(1), dim=-1)
    distance, nearest = gap.min(-1)
    return distance, distance <= reach[known].gather(1, nearest)
