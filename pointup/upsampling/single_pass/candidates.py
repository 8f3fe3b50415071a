"""Runs the model on a part of the cloud; the candidates equal those of a run on the whole cloud."""

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

# How often the spacing is smoothed by a mean over the neighbours.
_SMOOTHING = 2


@dataclass(frozen=True)
class Candidates:
    """M children of N parent points, in the order of their parents.

    A child that is out of reach or across a gap is replaced by a copy of its parent. Copies are
    selected last.

    Attributes:
        num_slots: (N,) int64, number of children of each parent; the sum is M.
        offset: (M, 3) float32, from the parent to the child.
        distance: (M,) float32, from the child to the nearest of its parent and the parent's
            neighbours.
        spacing: (N,) float32, smoothed distance between points around each parent.
        reach: (N,) float32, largest distance of new points to each parent.
        quota: (N,) float32, logarithm of the predicted share of each parent in the new points, up
            to a constant of the cloud.
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
        """(M,) int64, the number of each child among the children of its parent."""
        first = np.cumsum(self.num_slots) - self.num_slots
        return np.arange(len(self.offset)) - first[self.parent]

    def rows(self, start: int, stop: int) -> Candidates:
        """The candidates of the parents `start` to `stop`."""
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
        """The candidates with the `rejected` (M,) children replaced by copies of their parents."""
        return replace(
            self,
            offset=np.where(rejected[:, None], np.float32(0), self.offset),
            distance=np.where(rejected, np.float32(0), self.distance),
        )


@dataclass(frozen=True)
class Neighborhood:
    """C core points, and all other points that their children depend on.

    Attributes:
        pos: (N, 3) float32, the core points first.
        index: (N, K) int64 neighbours, each point itself first; -1 where no child depends on them.
        squared: (N, K) float32 squared distances.
        slot_index: (C, R) int64, the neighbour that each slot of each core point belongs to.
        places: (N,) int64, indices of the points in `Region.rows`.
    """

    pos: np.ndarray
    index: np.ndarray
    squared: np.ndarray
    slot_index: np.ndarray
    places: np.ndarray


def gather_neighborhood(
    region: Region, core: np.ndarray, k: int, num_slots: int, num_hops: int
) -> Neighborhood:
    """All points within `num_hops` steps from point to neighbour of the points at places `core`."""
    of_slots = region.neighbors_of(core, max(k, num_slots))
    frontier, found = core, [(of_slots[0][:, :k], of_slots[1][:, :k])]
    reached, touched = core, of_slots[1]
    for _ in range(num_hops - 1):
        frontier = np.setdiff1d(touched[touched >= 0], reached)
        reached = np.concatenate([reached, frontier])
        found.append(region.neighbors_of(frontier, k))
        touched = found[-1][1]
    # Only the positions of the outermost points are needed.
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
    # Centred in float64, so that differences of neighbours are exact in float32.
    centre = (positions.min(axis=0) + positions.max(axis=0)) / 2
    pos = (positions - centre).astype(np.float32)
    return Neighborhood(pos, index, squared, place[of_slots[1][:, :num_slots]], reached)


def num_hops(model: Upsampler) -> int:
    """Number of neighbour steps from a parent to the farthest point that its children depend on.

    One for the features of the parent's neighbours, one for each layer, one for the neighbours that
    the input features describe, and one for the local spacing of those.
    """
    return model.config.num_layers + 3


def make_candidates(
    model: Upsampler,
    region: Region,
    core: np.ndarray,
    num_slots: np.ndarray,
    device: torch.device,
    children_per_call: int,
    device_lock: AbstractContextManager[object],
) -> Candidates:
    """Children of the points at places `core` of the region, `num_slots` (C,) of each.

    The model runs while `device_lock` is held, with at most `children_per_call` children at a time.
    The largest distance of children to a point is `REACH` times its local spacing in the first
    pass, and its attribute `SLACK` in a later pass. Raises ModelError if the output of the model is
    not finite, ConfigError if the device runs out of memory.
    """
    if not num_slots.any():
        nothing = np.empty((0, 3), dtype=np.float32)
        ones = np.ones(len(core), dtype=np.float32)
        reach = _reach(region, core, model.config.k + 1)
        return Candidates(num_slots, nothing, nothing[:, 0], ones, reach, 0 * ones)
    # Parents with the same number of slots are consecutive.
    order = np.argsort(num_slots, kind="stable")
    near = gather_neighborhood(
        region, core[order], model.config.k + 1, int(num_slots.max()), num_hops(model)
    )
    slack = None
    if SLACK in (region.rows["attributes"].dtype.names or ()):
        slack = region.rows["attributes"][SLACK][near.places]
    try:
        with device_lock:
            offset, distance, *of_parents = _run(
                model, near, num_slots[order], slack, device, children_per_call
            )
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"{device} has too little memory for {len(near.pos)} points at a time; lower "
            "--token-budget"
        ) from error
    for values in (offset, *of_parents):
        if not np.isfinite(values).all():
            raise ModelError("the output of the model is not finite; train it again")
    back = np.argsort(np.repeat(order, num_slots[order]), kind="stable")
    place = np.argsort(order)
    return Candidates(num_slots, offset[back], distance[back], *(v[place] for v in of_parents))


def _reach(region: Region, core: np.ndarray, k: int) -> np.ndarray:
    """Largest distance (C,) of new points to each of the points at places `core`."""
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
    """Offset and distance of the children; smoothed spacing, reach and quota of their parents."""
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
        # An offset that is not finite is out of reach. It is kept, so that the caller reports it.
        is_copy = (index < 0) | (~is_near & offset.isfinite().all(-1))
        offsets.append(offset.masked_fill(is_copy.unsqueeze(-1), 0.0).flatten(0, 1).cpu())
        distances.append(distance.masked_fill(is_copy, 0.0).flatten().cpu())
    quota = model.quota_logits(features, geometry)
    of_parents = (values[: len(num_slots)].cpu() for values in (spacing[:, 0], reach, quota))
    return tuple(
        values.numpy() for values in (torch.cat(offsets), torch.cat(distances), *of_parents)
    )


def _calls(num_slots: np.ndarray, children_per_call: int) -> list[tuple[slice, int]]:
    """For each model call: a slice of parents with the same number of slots, and that number."""
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
    """Distance (n, R) of children to the nearest of their parent and its neighbours, and whether
    (n, R) it is within the reach of that point."""
    wide = slot_index if slot_index.shape[1] > geometry.index.shape[1] else geometry.index
    own = torch.arange(rows.start, rows.stop, device=pos.device).unsqueeze(1)
    known = torch.where(wide[rows] < 0, own, wide[rows])
    relative = pos[known] - pos[rows].unsqueeze(1)
    gap = torch.linalg.vector_norm(offset.unsqueeze(2) - relative.unsqueeze(1), dim=-1)
    distance, nearest = gap.min(-1)
    return distance, distance <= reach[known].gather(1, nearest)
