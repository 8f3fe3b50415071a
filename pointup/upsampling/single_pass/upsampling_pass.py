"""One pass over a stored cloud: candidates by the model, thinning, relaxation.

The cloud is divided into nested boxes by bisection. A cell has a quota of new points. A block is
thinned at a time. A batch goes through the model at a time. A tile is read at a time and processed
by one thread. Cells, blocks and batches depend on the cloud only; the result does not depend on
tiles.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from scipy.spatial import cKDTree

from pointup.geometry import kernels
from pointup.geometry.grids import box_of, in_box
from pointup.geometry.neighbors import DeviceTree, TreeMaker, host_tree
from pointup.model.upsampler import Upsampler
from pointup.upsampling.attributes import PARENT
from pointup.upsampling.options import UpsampleOptions
from pointup.upsampling.scatter import Scatter, scatter_of
from pointup.upsampling.single_pass.candidates import Candidates, make_candidates, use_of
from pointup.upsampling.single_pass.measured import Measured
from pointup.upsampling.single_pass.pass_output import PassOutput
from pointup.upsampling.single_pass.quotas import TargetCounts
from pointup.upsampling.single_pass.relaxation import (
    NUM_ON_SHEET,
    onto_facets,
    onto_surface,
    relax,
    relax_on_device,
    towards_measured,
    within_borders,
)
from pointup.upsampling.single_pass.selection import (
    NUM_WITHIN,
    OversampledCandidates,
    first_radius,
    select_evenly,
    shuffled,
)
from pointup.upsampling.store.bisection import BlockFiles, split_boxes
from pointup.upsampling.store.point_store import BLOCK_SIZE, Store
from pointup.upsampling.store.region import Region

CELL_SIZE = 32
"""Largest number of points of a cell, the box in which the number of new points is exact."""
_CHILDREN_PER_CALL = 16_384
_MOST_TOGETHER = 16  # blocks thinned at a time on a device
_MARGIN = 3.0  # around a block, in spacings: the points there take part in its relaxation
# Candidates of two passes near measured points are the most accurate: their distance to measured
# points is multiplied by this, so that more of them are selected.
_NEAR_MEASURED = 1.5


class UpsamplingPass:
    """One pass of upsampling over a store.

    Call `make_candidates` for every tile, then `colors`, then `thin` for the groups of each,
    `relax_group` for all `groups`, and `relax_block` for every block. Results are block files in
    the store's directory, for all processes; `output` reads them.

    `ratio` is the ratio of this pass; None computes it from the target density, point by point. A
    later pass needs `measured`, the store of the first pass. Its own store is in the coordinates of
    `measured` and has the attributes `PARENT`, the row of each point's parent in `measured`, and
    `TARGET_COUNT`, the ratio that is left to reach.

    With `oversampling` above 1, a second pass supplies that many candidates for each point that is
    kept, and the points are selected again: call `take_second_pass`, `candidates_from_second_pass`
    for every block, and then all steps from `colors` on. `num_steps` is the number of relaxation
    steps; by default that of the model's configuration. For `num_made` see `TargetCounts`.
    """

    def __init__(
        self,
        store: Store,
        model: Upsampler,
        options: UpsampleOptions,
        device: torch.device,
        token_budget: int | None = None,
        *,
        ratio: float | None,
        measured: Store | None = None,
        oversampling: float = 1.0,
        num_steps: int | None = None,
        num_made: np.ndarray | None = None,
    ) -> None:
        self.store, self.model, self.options, self.device = store, model, options, device
        self.ratio, self.measured, self.oversampling = ratio, measured, oversampling
        self.num_steps = model.config.relaxation_steps if num_steps is None else num_steps
        self._files = BlockFiles(store.directory)
        self.output = PassOutput(store, self._files, measured, options.originals)
        self._target_counts = TargetCounts(
            store, options, model.config, ratio, measured is None, num_made
        )
        self._second_pass: OversampledCandidates | None = None
        share = model.calibration.scatter if model.calibration and measured is None else 0.0
        # New points replace the measured points of surfaces.
        self._denoises = self._has_sheets and measured is None and not options.originals
        self._scatter = scatter_of(store) if share or self._denoises else Scatter(0.0, 0.0)
        self._noise = share * self._scatter.in_spacings
        on_cpu = device.type == "cpu"
        budget = token_budget or (BLOCK_SIZE if on_cpu else 16 * BLOCK_SIZE)
        # On a CPU, small enough for its cache.
        self._children_per_call = _CHILDREN_PER_CALL if on_cpu else 4 * budget
        self._batches = split_boxes(
            store.block_keys,
            lambda starts, stops: store.block_ptr[stops] - store.block_ptr[starts] <= budget,
        )
        # One batch at a time on an accelerator; other threads search neighbours meanwhile.
        self._device_lock: Any = nullcontext() if on_cpu else threading.Lock()
        # Without its kernels a device searches neighbours more slowly than the host.
        self._uses_device = kernels.take(torch.empty((0, 3), device=device), NUM_ON_SHEET + 1)
        self._make_tree: TreeMaker = host_tree
        if self._uses_device:
            use = partial(use_of, device, self._device_lock)
            self._make_tree = partial(DeviceTree, device=device, use=use)
        reach = model.config.reach
        self._measured = Measured(store, measured, options, reach, self._make_tree)

    def tiles(self, num_points: int, side: float | None = None) -> list[Tile]:
        """Tiles of at most `num_points` points, or with sides of at most `side`, in file units."""
        side = side and side / self._measured.unit
        return cut_into_tiles(self.store, self._batches, num_points, side)

    def make_candidates(self, tile: Tile) -> None:
        """Run the model on the points of a tile; it makes more candidates than the target count."""
        region = Region(self.store, tile.start, tile.stop, make_tree=self._make_tree)
        for batch in pairwise([*tile.batches, tile.stop]):
            blocks = range(*batch)
            of_blocks = [self._target_counts.ratios(block) for block in blocks]
            core = np.concatenate([region.places(block) for block in blocks])
            of_core = np.concatenate([ratio for ratio, _ in of_blocks])
            candidates = make_candidates(
                self.model,
                region,
                core,
                self._target_counts.num_slots(of_core),
                of_core,
                self.device,
                self._children_per_call,
                self._device_lock,
                self.measured is None,
                self._noise,
            )
            stop = 0
            for block, (ratio, target_count) in zip(blocks, of_blocks, strict=True):
                start, stop = stop, stop + len(ratio)
                part = candidates.rows(start, stop)
                if self.measured is None:
                    self._measured.reach.save(block, part.reach)
                self._save_candidates(block, part, ratio, target_count)

    def take_second_pass(self, second_pass: UpsamplingPass) -> None:
        """Take the candidates from the outputs of this pass and of a second pass from now on.

        The second pass is one over `output.for_second_pass`, with this pass's store as `measured`.
        """
        self._second_pass = OversampledCandidates(self.output, second_pass.output)

    def candidates_from_second_pass(self, block: int) -> None:
        """Replace the candidates of a block by the points of this pass and the second pass."""
        assert self._second_pass is not None
        saved = self._files.load(block, "candidates")
        of_rows = saved["spacing"], saved["reach"], saved["quota"]
        found = self._second_pass.candidates(block, *of_rows)
        self._save_candidates(block, found, saved["ratio"], saved["target_count"])

    def colors(self, num_workers: int = 1) -> list[list[list[int]]]:
        """Groups of blocks to thin, one list of groups after another: blocks of a list don't touch.

        A group is one block on the CPU. On a device it has more where blocks outnumber workers.
        """
        bounds, spacing = [], []
        for block in range(len(self)):
            saved = self._files.load(block, "candidates")
            bounds.append(saved["bounds"])
            spacing.append(np.median(saved["spacing"]))
        self._low, self._high = np.array(bounds).transpose(1, 0, 2)
        self._spacing = np.array(spacing)
        self._quotas = self._target_counts.of_cells(self._files)
        self._colors = color_boxes(self._low, self._high)
        colors = []
        for color in range(self._colors.max() + 1):
            blocks = np.flatnonzero(self._colors == color).tolist()
            size = min(math.ceil(len(blocks) / num_workers), _MOST_TOGETHER)
            size = size if self._uses_device else 1
            colors.append([blocks[i : i + size] for i in range(0, len(blocks), size)])
        return colors

    def thin(self, blocks: Sequence[int]) -> None:
        """Select candidates of blocks of one colour up to their quotas, away from those of blocks
        done before."""
        to_save, to_thin = zip(*map(self._to_thin, blocks), strict=True)
        device = self.device if self._uses_device else torch.device("cpu")
        with use_of(device, self._device_lock, sum(len(points) for points, *_ in to_thin)):
            picks = select_evenly(to_thin, self.options.has_exact_numbers, device)
        for block, of_candidates, picked in zip(blocks, to_save, picks, strict=True):
            target_count = of_candidates.pop("target_count")
            of_picked = {name: values[picked] for name, values in of_candidates.items()}
            self._files.save(block, "picked", target_count=target_count, **of_picked)

    def _to_thin(self, block: int) -> tuple[dict[str, np.ndarray], tuple[Any, ...]]:
        """What is saved of the candidates of a block if they are picked, with the target count of
        its points, and the block for `select_evenly`."""
        saved = self._files.load(block, "candidates")
        found = Candidates(*(saved[name] for name in Candidates.__dataclass_fields__))
        radius = float(saved["radius"])
        if self.oversampling == 1:
            self._files.delete(block, "candidates")
        region = Region(self.store, block, block + 1)
        core = region.places(block)
        parent = found.parent
        points = region.rows["position"][core[parent]] + found.offset
        scale = (found.spacing[parent] * found.error).astype(np.float64)
        distance = np.full(len(points), np.inf)
        if self.options.originals:
            distance = found.distance / scale
            if self._second_pass:
                distance *= _NEAR_MEASURED
        for other in touching(self._low, self._high, block):
            if self._colors[other] < self._colors[block]:
                kept = self._files.load(other, "picked")["position"]
                if len(kept) and len(points):
                    reach = radius * scale.max()
                    low, high = box_of(kept)
                    near = np.flatnonzero(in_box(points, low - reach, high + reach))
                    gap = host_tree(kept).query(points[near], distance_upper_bound=reach)[0]
                    distance[near] = np.minimum(distance[near], gap / scale[near])
        number = int(self.store.block_ptr[block]) + parent
        priority = shuffled(self.options.seed, number, found.slot)
        distance[self._measured.is_far(region, points, found.distance)] = -1.0
        if self.options.max_uncertainty is not None:
            most = self.options.max_uncertainty / self._measured.unit
            distance[found.uncertainty > most] = -1.0
        if self.measured is not None:
            number = region.rows["attributes"][PARENT][core[parent]]
        of_candidates = {
            "position": points,
            "row": parent,
            "uncertainty": found.uncertainty,
            "parent": number,
            "target_count": saved["target_count"],
        }
        numbers = saved["cell"][parent], self._quotas[block], priority
        return of_candidates, (points, scale, distance, *numbers, radius)

    @property
    def groups(self) -> list[range]:
        """Blocks whose points are relaxed together on the device; none on the CPU."""
        if not self._uses_device or self._second_pass:
            return []
        return [range(*ends) for ends in pairwise([*self._batches.tolist(), len(self)])]

    def relax_group(self, blocks: Sequence[int]) -> None:
        """Relax the selected points of several blocks on the device, for `relax_block`."""
        parts = {}
        for block in blocks:
            selected = self._files.load(block, "picked")["position"]
            free, fixed, _ = self._around(block, selected)
            if len(free) + len(fixed) > NUM_ON_SHEET:
                parts[block] = free, fixed, len(selected)
        num_points = sum(len(free) + len(fixed) for free, fixed, _ in parts.values())
        if parts:
            with use_of(self.device, self._device_lock, num_points):
                relaxed = relax_on_device([*parts.values()], self.device, *self._relaxation)
            for block, points in zip(parts, relaxed, strict=True):
                self._files.save(block, "relaxed", position=points)

    def relax_block(self, block: int) -> None:
        """Relax the selected points of a block, unless its group was, and compute what
        `Measured.settle` returns of those that `Measured.is_kept` keeps."""
        picked = self._files.load(block, "picked")
        region = Region(self.store, block, block + 1, make_tree=self._make_tree)
        selected = picked["position"]
        is_relaxed = not self._second_pass and self._files.exists(block, "relaxed")
        if not is_relaxed or self._has_sheets:
            free, fixed, sources = self._around(block, selected)
        if is_relaxed:
            points = self._files.load(block, "relaxed")["position"]
            self._files.delete(block, "relaxed")
        elif self._second_pass:
            # They are relaxed already, and only moved onto the surface through all candidates.
            points = onto_surface(selected, free, fixed)
        else:
            points = relax(free, fixed, *self._relaxation, len(selected))
        if self._has_sheets:
            tree = cKDTree(sources)
            if self._denoises and not self._second_pass:
                points = towards_measured(points, free[len(points) :], tree, self._scatter.length)
            points = onto_facets(within_borders(points, tree), tree)
        new = picked | self._measured.settle(region, points, selected)
        kept = self._measured.is_kept(new["position"], new["distance"])
        of_rows = {"target_count": new.pop("target_count")}
        self._files.save(block, "points", **of_rows, **{name: new[name][kept] for name in new})

    @property
    def _has_sheets(self) -> bool:
        """Most neighbourhoods of a survey lie on no single surface. The store of a later pass has
        the axes of the first."""
        return not (self.measured or self.store).frame.is_upright

    @property
    def _relaxation(self) -> tuple[int, bool, float, float, float]:
        """Options of `relax`."""
        config = self.model.config
        lengths = config.relaxation_residual, config.volume_relaxation, config.relaxation_radius
        return self.num_steps, self._has_sheets, *lengths

    def _around(
        self, block: int, selected: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Points around the `selected` (M, 3) of a block: the free ones (F, 3), which are the
        selected of all blocks, those of this one first, or with a second pass all candidates; the
        fixed ones (G, 3); and those of the store (S, 3)."""
        margin = _MARGIN * self._spacing[block]
        box = self._low[block] - margin, self._high[block] + margin
        free, sources = Surroundings(selected, *box), Surroundings(selected, *box)
        for other in [block, *touching(self._low, self._high, block, margin).tolist()]:
            rows = self.store.read_block(other)["position"]
            if self._second_pass:
                saved = self._files.load(other, "candidates")
                free.add(rows.repeat(saved["num_slots"], axis=0) + saved["offset"])
            elif other != block:
                free.add(self._files.load(other, "picked")["position"])
            sources.add(rows)
        around, measured = free.nearest(), sources.nearest()
        if not self._second_pass:
            around = np.concatenate([selected, around])
        return around, measured if self.options.originals else measured[:0], measured

    def needs_next_pass(self) -> bool:
        """Whether a next pass has points to add."""
        if self.output.num_points() < 2:
            return False
        return self.ratio is not None or self.output.largest_target_count() > 1

    def __len__(self) -> int:
        return self.store.num_blocks

    def _save_candidates(
        self, block: int, found: Candidates, ratio: np.ndarray, target_count: np.ndarray
    ) -> None:
        rows = self.store.read_block(block)
        points = rows["position"][found.parent] + found.offset
        spacing = found.spacing[found.parent]
        found = found.copies(self._measured.is_empty(points, found.distance, spacing))
        first = split_boxes(rows["key"], lambda starts, stops: stops - starts <= CELL_SIZE)
        cell = np.searchsorted(first, np.arange(len(rows)), side="right") - 1
        points = rows["position"][found.parent] + found.offset
        scale = found.spacing[found.parent] * found.error
        # The median number of candidates within the first radius of thinning.
        factor = max(1.0, 0.75 * self.oversampling) if self._second_pass else 1.0
        num_within = round(NUM_WITHIN * factor)
        radius = first_radius(points, scale, num_within) if len(points) else 0.0
        reach = radius * scale.max(initial=0.0)
        low, high = box_of(points if len(points) else rows["position"])
        self._files.save(
            block,
            "candidates",
            **vars(found),
            cell=cell,
            target_count=target_count,
            ratio=ratio,
            radius=np.array(radius),
            bounds=np.array([low - reach, high + reach]),
        )


MOST_AROUND = 8
"""Largest number of points around each point of a block, or of `BLOCK_SIZE` if it has fewer. Of
more, those nearest to its points are taken: a block of a few points far from each other, such as
wrong measurements in the air, has the whole cloud around it."""


class Surroundings:
    """Points in a box around `points` (M, 3), the nearest to them if there are many.

    low, high: (3,) corners of the box.
    """

    def __init__(self, points: np.ndarray, low: np.ndarray, high: np.ndarray) -> None:
        self._points, self._low, self._high = points, low, high
        self._most = MOST_AROUND * max(len(points), BLOCK_SIZE)
        self._parts = [np.empty((0, 3))]

    def add(self, points: np.ndarray) -> None:
        """Take those of points (N, 3) that lie in the box."""
        self._parts.append(points[in_box(points, self._low, self._high)])
        if sum(map(len, self._parts)) > 2 * self._most:
            self._parts = [self.nearest()]

    @cached_property
    def _tree(self) -> cKDTree:
        return cKDTree(self._points)

    def nearest(self) -> np.ndarray:
        """All points taken (N, 3), or, of more than `most`, those nearest to the points inside."""
        points = np.concatenate(self._parts)
        if len(points) <= self._most or not len(self._points):
            return points[: self._most]
        distance = np.asarray(self._tree.query(points)[0])
        return points[np.sort(np.argpartition(distance, self._most)[: self._most])]


def touching(low: np.ndarray, high: np.ndarray, box: int, margin: float = 0.0) -> np.ndarray:
    """Indices of the other boxes that touch box number `box`, or lie within `margin` of it.

    low, high: (B, 3) bounds of the boxes. The margin applies along every axis.
    """
    touched = ((low <= high[box] + margin) & (high >= low[box] - margin)).all(axis=1)
    touched[box] = False
    return np.flatnonzero(touched)


def color_boxes(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """A colour (B,) int64 for each box; boxes that touch have different colours."""
    colors = np.full(len(low), -1, dtype=np.int64)
    for box in range(len(low)):
        taken = colors[touching(low, high, box)]
        colors[box] = np.setdiff1d(np.arange(len(taken) + 1), taken)[0]
    return colors


@dataclass(frozen=True)
class Tile:
    """Blocks from `start` to `stop`; `batches` are the first blocks of its batches."""

    start: int
    stop: int
    batches: np.ndarray


def cut_into_tiles(
    store: Store, batches: np.ndarray, num_points: int, side: float | None
) -> list[Tile]:
    """Split a cloud into tiles of at most `num_points` points, or with sides of at most `side`.

    A tile is at least one batch. batches: (B,) the first blocks of the batches.
    """
    ends = np.append(batches, store.num_blocks)

    def fits(starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        first, last = ends[starts], ends[stops]
        if side is None:
            return store.block_ptr[last] - store.block_ptr[first] <= num_points
        low = np.array([store.low[a:b, :2].min(0) for a, b in zip(first, last, strict=True)])
        high = np.array([store.high[a:b, :2].max(0) for a, b in zip(first, last, strict=True)])
        return (high - low <= side).all(axis=1)

    first = split_boxes(store.block_keys[batches], fits)
    return [
        Tile(int(ends[a]), int(ends[b]), batches[a:b]) for a, b in pairwise([*first, len(batches)])
    ]
