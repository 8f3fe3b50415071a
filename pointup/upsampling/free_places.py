"""Moves new points to free places of a file whose scale would put several points in one place.

LAS rounds coordinates to a scale. Where that is coarse, many new points would lie on measured ones
or on each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pointup.geometry.grids import box_of, in_box
from pointup.upsampling.options import UpsampleOptions
from pointup.upsampling.single_pass.pass_output import PassOutput
from pointup.upsampling.single_pass.upsampling_pass import touching
from pointup.upsampling.store.point_store import Store, exact_positions
from pointup.upsampling.store.region import Region

_SHIFTS = np.array([shift for shift in np.ndindex(3, 3, 3) if shift != (1, 1, 1)]) - 1.0


def move_to_free_places(
    outputs: Sequence[PassOutput],
    measured: Store,
    scale: np.ndarray,
    offset: np.ndarray,
    options: UpsampleOptions,
) -> int:
    """Move each new point whose place is taken to the nearest free one of the 26 around it.

    scale, offset: (3,) of the file; a place is a multiple of the scale. Taken are the places of
    measured points, if the output keeps them, and of new points before. Blocks follow each other in
    one order, so that the result depends neither on tiles nor on processes. Returns the number of
    new points that stay on a taken place; with a largest distance none moves.
    """
    if scale.min() < 2 * measured.resolution * measured.frame.unit:
        return 0  # Places finer than the grid of the store: only equal positions would meet.
    blocks, bounds = [], []
    for output in outputs:
        for block in range(output.store.num_blocks):
            if len(positions := output.positions(block)):
                blocks.append((output, block))
                bounds.append(box_of(positions))
    if not blocks:
        return 0
    low, high = np.array(bounds).transpose(1, 0, 2)
    # A largest distance allows fewer points, but no farther ones.
    may_move = options.max_distance is None
    margin = 3.0 * float(scale.max())
    measured_low, measured_high = measured.bounds_in_file()
    taken: dict[int, np.ndarray] = {}
    needed_until: list[int] = []
    num_left = 0
    for number, (output, block) in enumerate(blocks):
        around = touching(low, high, number, margin)
        near = [taken[other] for other in around.tolist() if other < number]
        box = low[number] - margin, high[number] + margin
        if options.originals:
            meets = ((measured_low <= box[1]) & (measured_high >= box[0])).all(axis=1)
            for other in np.flatnonzero(meets).tolist():
                points = measured.frame.to_file(measured.read_block(other)["position"])
                near.append(np.rint((points - offset) / scale))
        # No point of this block can get a place outside of its box.
        first, last = ((corner - offset) / scale for corner in box)
        near = [places[in_box(places, first, last)] for places in near]
        steps = (output.positions(block) - offset) / scale
        keys = exact_positions(np.concatenate([np.empty((0, 3)), *near]))
        places, is_left = _apart(steps, keys, scale)
        moved = np.flatnonzero((places != np.rint(steps)).any(axis=1))
        if may_move and len(moved):
            _move(output, block, moved, places[moved] * scale + offset)
        num_left += int(is_left.sum()) + (0 if may_move else len(moved))
        taken[number] = places if may_move else np.rint(steps)
        needed_until.append(int(around.max(initial=0)))
        taken = {other: there for other, there in taken.items() if needed_until[other] > number}
    return num_left


def _move(output: PassOutput, block: int, moved: np.ndarray, there: np.ndarray) -> None:
    """Change the positions of the new points `moved` (Q,) of a block to `there` (Q, 3) in the file,
    and their distances to the nearest measured point."""
    measured = output.measured or output.store
    points = measured.frame.from_file(there)
    arrays = output.files.load(block, "points")
    own = points if output.measured is None else output.store.frame.from_file(points)
    arrays["position"][moved] = own
    arrays["distance"][moved] = Region.around(measured, points).neighbors(points, 1)[0][:, 0]
    output.files.save(block, "points", **arrays)


def _apart(
    steps: np.ndarray, taken: np.ndarray, scale: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Places (M, 3) of points at `steps` (M, 3), in units of `scale`, and whether each is taken.

    taken: hashes of the places that are taken from the start.
    """
    nearest = np.rint(steps)
    places = nearest.copy()
    left = np.arange(len(steps))
    order = np.zeros((len(steps), 1), np.int64)
    shifts = np.zeros((1, 3))
    for attempt in range(1 + len(_SHIFTS)):
        if attempt == 1:
            shifts = _SHIFTS
            gaps = ((nearest[left] - steps[left])[:, None] + shifts) * scale
            order = np.argsort(np.square(gaps).sum(axis=2), axis=1, kind="stable")
        tried = nearest[left] + shifts[order[:, max(attempt - 1, 0)]]
        keys = exact_positions(tried)
        # Of each place the first point there, if none before has it.
        _, first = np.unique(np.append(taken, keys), return_index=True)
        found = np.zeros(len(keys), bool)
        found[first[first >= len(taken)] - len(taken)] = True
        places[left[found]] = tried[found]
        taken = np.append(taken, keys[found])
        left, order = left[~found], order[~found]
        if not len(left):
            break
    is_left = np.zeros(len(steps), bool)
    is_left[left] = True
    return places, is_left
