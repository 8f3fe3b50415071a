"""Runs the model on a part of the cloud; the candidates equal those of a run on the whole cloud."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pointup.errors import OUT_OF_MEMORY, ConfigError, ModelError
from pointup.geometry.local_geometry import (
    LocalGeometry,
    columns_of,
    drops,
    local_geometry,
    without_bridges,
)
from pointup.geometry.midpoints import slot_ranks
from pointup.model.children import LARGEST_LOG_ERROR
from pointup.model.config import ModelConfig
from pointup.model.upsampler import Upsampler
from pointup.upsampling.attributes import UNCERTAINTY
from pointup.upsampling.store.bisection import BlockFiles, split_boxes
from pointup.upsampling.store.point_store import Store
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
        error: (M,) float32, predicted error of the child to the power of the model's
            `error_exponent`, a factor of the spacing in the selection; 1 without a prediction.
        uncertainty: (M,) float32, distance to the true surface that nine in ten such children stay
            within, by the model's calibration; 0 without one.
        spacing: (N,) float32, smoothed distance between points around each parent.
        reach: (N,) float32, largest distance of new points to each parent.
        quota: (N,) float32, logarithm of the predicted share of each parent in the new points, up
            to a constant of the cloud.
    """

    num_slots: np.ndarray
    offset: np.ndarray
    distance: np.ndarray
    error: np.ndarray
    uncertainty: np.ndarray
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
            self.error[children],
            self.uncertainty[children],
            self.spacing[start:stop],
            self.reach[start:stop],
            self.quota[start:stop],
        )

    @classmethod
    def joined(cls, parts: Sequence[Candidates]) -> Candidates:
        """The candidates of several lists of parents, one after another."""
        names = [field.name for field in fields(cls)]
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    def copies(self, rejected: np.ndarray) -> Candidates:
        """The candidates with the `rejected` (M,) children replaced by copies of their parents."""
        return replace(
            self,
            offset=np.where(rejected[:, None], np.float32(0), self.offset),
            distance=np.where(rejected, np.float32(0), self.distance),
        )


def make_candidates(
    model: Upsampler,
    region: Region,
    core: np.ndarray,
    num_slots: np.ndarray,
    ratio: np.ndarray,
    device: torch.device,
    children_per_call: int,
    device_lock: AbstractContextManager[object],
    is_first: bool = True,
    noise: float = 0.0,
) -> Candidates:
    """Children of the points at places `core` of the region, `num_slots` (C,) of each, to become
    `ratio` (C,) points.

    The points are in the order of the store. The model runs while `device_lock` is held, with at
    most `children_per_call` children at a time. The largest distance of children to a point is
    `ModelConfig.reach` times its local spacing in the first pass (`is_first`), and its attribute
    `SLACK` in a later pass. The uncertainty of measured points is `noise` times their spacing.
    Raises ModelError if the output of the model is not finite, ConfigError if the device runs out
    of memory.
    """
    groups = near_groups(region, core)
    if len(groups) > 1:
        limits = device, children_per_call, device_lock, is_first, noise
        parts = [
            make_candidates(model, region, core[group], num_slots[group], ratio[group], *limits)
            for group in groups
        ]
        return Candidates.joined(parts)
    if not num_slots.any():
        nothing = np.empty((0, 3), dtype=np.float32)
        ones = np.ones(len(core), dtype=np.float32)
        reach = _reach(region, core, model.config)
        none = nothing[:, 0]
        return Candidates(num_slots, nothing, none, none, none, ones, reach, 0 * ones)
    # Parents with the same number of slots are consecutive.
    order = np.argsort(num_slots, kind="stable")
    ranks = slot_ranks(int(num_slots.max()), model.config.extrapolation).numpy()
    near = gather_neighborhood(region, core[order], ranks, model.config)
    # In the first pass an attribute of that name is one of the file.
    slack = None if is_first else region.rows["attributes"][SLACK][near.places]
    with use_of(device, device_lock, len(near.pos)):
        offset, distance, spread, log_error, *of_parents = _run(
            model, near, num_slots[order], slack, device, children_per_call
        )
    for values in (offset, spread, *of_parents):
        if not np.isfinite(values).all():
            raise ModelError("the output of the model is not finite; train it again")
    back = np.argsort(np.repeat(order, num_slots[order]), kind="stable")
    place = np.argsort(order)
    spacing, reach, quota = (values[place] for values in of_parents)
    uncertainty = np.zeros_like(spread)
    if model.calibration:
        within = model.calibration.within(log_error[back], ratio.repeat(num_slots))
        before = noise * spacing if is_first else region.rows["attributes"][UNCERTAINTY][core]
        # A child is off by the error of its parent and by its own.
        uncertainty = np.hypot(within * spacing.repeat(num_slots), before.repeat(num_slots))
    return Candidates(
        num_slots,
        offset[back],
        distance[back],
        spread[back],
        uncertainty.astype(np.float32),
        spacing,
        reach,
        quota,
    )


def _reach(region: Region, core: np.ndarray, config: ModelConfig) -> np.ndarray:
    """Largest distance (C,) of new points to each of the points at places `core`."""
    near = gather_neighborhood(region, core, np.empty(0, dtype=np.int64), config)
    pos, index, squared = map(torch.from_numpy, (near.pos, near.index, near.squared))
    ptr = torch.tensor([0, len(pos)], device="cpu")
    geometry = local_geometry(pos, ptr, squared, index)
    return (config.reach * geometry.local_spacing[: len(core), 0]).numpy()


@contextmanager
def use_of(
    device: torch.device, lock: AbstractContextManager[object], num_points: int
) -> Iterator[None]:
    """Context of operations on `num_points`, while the lock of the device is held.

    Autocast is off: that of the caller holds in its own thread only, and the points would depend on
    the number of threads. Raises ConfigError if the device runs out of memory.
    """
    autocast: Any = nullcontext()
    if torch.amp.is_autocast_available(device.type):
        autocast = torch.autocast(device.type, enabled=False)
    try:
        with lock, autocast:
            yield
    except RuntimeError as error:
        if not OUT_OF_MEMORY.search(str(error)):
            raise
        raise ConfigError(
            f"{device} has too little memory for {num_points} points at a time; lower "
            "--token-budget, or in Python choose device='cpu'"
        ) from error


@torch.inference_mode()
def _run(
    model: Upsampler,
    near: Neighborhood,
    num_slots: np.ndarray,
    slack: np.ndarray | None,
    device: torch.device,
    children_per_call: int,
) -> tuple[np.ndarray, ...]:
    """Offset, distance, error and its logarithm before the exponent, of the children; smoothed
    spacing, reach and quota of their parents."""
    pos, index, squared, slot_index, in_plane = (
        torch.from_numpy(values).to(device)
        for values in (near.pos, near.index, near.squared, near.slot_index, near.columns)
    )
    config = model.config
    geometry = local_geometry(pos, torch.tensor([0, len(pos)], device=device), squared, index)
    geometry = replace(geometry, needed=near.needed)
    columns = drop = None
    if config.column_layers:
        columns = columns_of(pos, in_plane, config.column_stride)
        if config.descent:
            drop = drops(columns, config.reach * geometry.local_spacing[: len(in_plane)])
    points = model.describe(geometry, columns)
    reach = config.reach * geometry.local_spacing[:, 0]
    if slack is not None:
        reach = torch.from_numpy(slack).to(device)
    spacing = geometry.spacing
    for _ in range(_SMOOTHING):
        spacing = spacing[geometry.index].mean(1)
    by_error = config.chooses_by_error
    exponent = config.quota_exponent if by_error else config.density_exponent
    # With predicted errors, those of each call are added below.
    quota = exponent * model.quota_logits(points, geometry)
    offsets, distances, errors, log_errors = [], [], [], []
    for rows, slots in _calls(num_slots, children_per_call):
        index = without_bridges(slot_index[rows, :slots], rows, pos, geometry.local_spacing)
        children = model.place_children(pos, rows, index, points, geometry, drop=drop)
        error = children.new_ones(children.shape[:2])
        log_error = error
        if config.predict_error:
            log_error, children = children[..., 3], children[..., :3]
        if by_error:
            error = log_error.mul(config.error_exponent).exp()
        offset = children - pos[rows].unsqueeze(1)
        distance, is_near = _distance_to_points(offset, rows, slot_index, pos, reach, geometry)
        # An offset that is not finite is out of reach. It is kept, so that the caller reports it.
        is_copy = (index < 0) | (~is_near & offset.isfinite().all(-1))
        if by_error:
            of_errors = _quota_of_errors(log_error.masked_fill(is_copy, torch.inf))
            quota[rows] += config.density_exponent * of_errors
        offsets.append(offset.masked_fill(is_copy.unsqueeze(-1), 0.0).flatten(0, 1).cpu())
        distances.append(distance.masked_fill(is_copy, 0.0).flatten().cpu())
        errors.append(error.flatten().cpu())
        log_errors.append(log_error.flatten().cpu())
    of_parents = (values[: len(num_slots)].cpu() for values in (spacing[:, 0], reach, quota))
    of_children = (torch.cat(values) for values in (offsets, distances, errors, log_errors))
    return tuple(values.numpy() for values in (*of_children, *of_parents))


def _quota_of_errors(log_error: Tensor) -> Tensor:
    """Quotas (n,) of points from the log errors (n, R) of their candidates, inf for copies.

    Thinning of the whole cloud keeps candidates farther apart than a radius times their error: on a
    surface, a number in inverse proportion to the square of the error.
    """
    num_slots = log_error.shape[1]
    lowest = log_error.new_full((), -2 * LARGEST_LOG_ERROR)
    return torch.logsumexp(-2 * log_error, dim=1).maximum(lowest) - math.log(num_slots)


def _calls(num_slots: np.ndarray, children_per_call: int) -> list[tuple[slice, int]]:
    """For each model call: a slice of parents with the same number of slots, and that number."""
    calls = []
    values, starts = np.unique(num_slots, return_index=True)
    ends = pairwise([*starts.tolist(), len(num_slots)])
    for slots, (start, stop) in zip(values.tolist(), ends, strict=True):
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


@dataclass(frozen=True)
class Neighborhood:
    """C core points, and all other points that their children depend on.

    Attributes:
        pos: (N, 3) float32, the core points first, relative to the median of these.
        index: (N, K) int64 neighbours, each point itself first; -1 where no child depends on them.
        squared: (N, K) float32 squared distances.
        slot_index: (C, R) int64, the neighbour that each slot of each core point belongs to.
        places: (N,) int64, indices of the points in `Region.rows`.
        columns: (n, S) int64, the horizontally nearest points of the first n points, which are
            those that children attend to in columns; S is 0 for a model without column layers.
        needed: of how many first points the features are needed, before the layers of the model and
            after each.
    """

    pos: np.ndarray
    index: np.ndarray
    squared: np.ndarray
    slot_index: np.ndarray
    places: np.ndarray
    columns: np.ndarray
    needed: tuple[int, ...]


class _Neighborhoods:
    """Collects points of a region, in steps from points to their k nearest or their columns."""

    def __init__(
        self, region: Region, core: np.ndarray, k: int, num_of_core: int, column_size: int
    ) -> None:
        self.region, self.k, self.column_size = region, k, column_size
        distance, self.of_core = region.neighbors_of(core, max(k, num_of_core))
        self.reached, self.distance, self.nearest = core, distance[:, :k], self.of_core[:, :k]
        self.columns = np.empty((0, column_size), dtype=np.int64)

    def step(self, touched: np.ndarray) -> np.ndarray:
        """Add the `touched` places, -1 for none, that are not there yet; their neighbours."""
        places = self.missing(touched)
        distance, nearest = self.region.neighbors_of(places, self.k)
        self.reached = np.concatenate([self.reached, places])
        self.distance = np.concatenate([self.distance, distance])
        self.nearest = np.concatenate([self.nearest, nearest])
        return nearest

    def missing(self, touched: np.ndarray) -> np.ndarray:
        """Those of the `touched` places, -1 for none, that are not there yet, in the order of the
        store."""
        # Flags are faster than sets of numbers. The last one stands for none.
        is_missing = np.zeros(len(self.region) + 1, dtype=bool)
        is_missing[touched] = True
        is_missing[self.reached] = False
        places = np.flatnonzero(is_missing[:-1])
        # The order in the region depends on tiles. A product of matrices depends on the order of
        # rows, by the last digit.
        return places[np.argsort(self.region.numbers(places))]

    def find_columns(self) -> np.ndarray:
        """The columns of those points that are there so far and whose columns are not."""
        places = self.reached[len(self.columns) :]
        _, found = self.region.neighbors_of(places, self.column_size, dims=2)
        self.columns = np.concatenate([self.columns, found])
        return found


def gather_neighborhood(
    region: Region, core: np.ndarray, ranks: np.ndarray, config: ModelConfig
) -> Neighborhood:
    """All points on which the children of the points at places `core` depend.

    The children of each point are tied to its neighbours of the `ranks` (R,); with none, only the
    local spacing of the core is asked for. Steps from a parent to the farthest of these points: one
    for the features of the parent's neighbours, one for each attention layer, one for the
    neighbours that the input features describe, and one for the local spacing of those.
    """
    k, of_model = config.k + 1, len(ranks) > 0
    num_of_core = int(ranks.max()) + 1 if of_model else 0
    found = _Neighborhoods(region, core, k, num_of_core, config.column_size if of_model else 0)
    touched, needed = found.of_core, []
    for _ in range(config.num_layers + 1 if of_model else 0):
        touched = found.step(touched)
        needed.append(len(found.reached))
    if found.column_size:
        for _ in range(config.column_layers):
            found.step(found.find_columns()[:, :: config.column_stride])
            needed.append(len(found.reached))
        # Points of columns that are reached last need only their position and that of theirs.
        found.find_columns()
        touched = found.nearest
    touched = found.step(touched)
    known = len(found.reached)
    # Of the outermost points only the positions are needed.
    outermost = found.missing(np.concatenate([touched.ravel(), found.columns.ravel()]))
    reached = np.concatenate([found.reached, outermost])

    place = np.full(len(region) + 1, -1, dtype=np.int64)
    place[reached] = np.arange(len(reached))
    index = np.full((len(reached), k), -1, dtype=np.int64)
    squared = np.full((len(reached), k), np.inf, dtype=np.float32)
    index[:, 0], squared[:, 0] = np.arange(len(reached)), 0.0
    index[:known] = place[found.nearest]
    squared[:known] = np.square(found.distance)
    positions = region.rows["position"][reached]
    # Centred in float64, so that differences of neighbours are exact in float32. At the median,
    # because single points far from all others must not move the centre away from these.
    pos = (positions - np.median(positions[: len(core)], axis=0)).astype(np.float32)
    slots = found.of_core[:, ranks]
    places = place[slots], reached, place[found.columns]
    return Neighborhood(pos, index, squared, *places, tuple(reversed(needed)))


# Largest side of a group, in steps of the store's grid: about a thousand spacings, of which float32
# resolves the 16,000th part.
_LARGEST_SIDE = 2.0**24
# Groups of so few points are not divided further, however far apart they are: each costs a call of
# the model.
_FEW = 64


def near_groups(region: Region, core: np.ndarray) -> list[slice]:
    """Slices of the places `core`, whose points are in the order of the store.

    Mostly there is one. Where points are very far apart, such as a scan and a stray return at the
    origin of its coordinate system, differences between neighbours would be lost in float32. The
    groups depend on these points only. A group by itself is one group.
    """
    rows = region.rows[core]
    # The last entry of `reduceat` needs a row behind the end.
    positions = np.concatenate([rows["position"], rows["position"][-1:]])

    def fits(starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        bounds = np.column_stack([starts, stops]).ravel()
        low, high = (of.reduceat(positions, bounds)[::2] for of in (np.minimum, np.maximum))
        is_small: np.ndarray = (high - low).max(axis=1) <= _LARGEST_SIDE * region.resolution
        return is_small | (stops - starts <= _FEW)

    starts = split_boxes(rows["key"], fits).tolist()
    return [slice(*ends) for ends in pairwise([*starts, len(core)])]


SLACK = "slack"
"""Attribute of points between two passes: the largest distance of a point of the next pass to each
of them. By the triangle inequality, such a point is within reach of a measured point."""


class Reach:
    """The reach of each measured point: `ModelConfig.reach` times its local spacing.

    The first pass computes it block by block and saves it in the store's directory, where later
    passes and other processes read it.
    """

    def __init__(self, measured: Store) -> None:
        self._ptr = measured.block_ptr
        self._files = BlockFiles(measured.directory)

    def save(self, block: int, reach: np.ndarray) -> None:
        """Save the reach (N,) of the points of a block."""
        self._files.save(block, "reach", reach=reach.astype(np.float32))

    def of_block(self, block: int) -> np.ndarray:
        """The reach (N,) float32 of the points of a block."""
        return self._files.load(block, "reach")["reach"]

    def slack(self, rows: np.ndarray, distance: np.ndarray) -> np.ndarray:
        """Reach minus distance (Q,) of points to their nearest measured points; negative: too far.

        rows: (Q,) rows of the nearest points in the measured store, distance: (Q,) to them.
        """
        block = np.searchsorted(self._ptr, rows, side="right") - 1
        slack = -distance.astype(np.float64)
        for number in np.unique(block).tolist():
            here = block == number
            slack[here] += self.of_block(number)[rows[here] - self._ptr[number]]
        return slack
