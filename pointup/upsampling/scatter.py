"""Scatter: how far the points of a cloud lie off smooth surfaces, a sign of noise."""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from pointup.geometry.grids import spread
from pointup.geometry.surfaces import principal_axes, surface_height
from pointup.upsampling.options import UpsampleOptions
from pointup.upsampling.store.point_store import Store
from pointup.upsampling.store.region import Region

LITTLE_SCATTER, MUCH_SCATTER = 0.08, 0.15
"""Scatter up to which `shapes` suits a shape better than `noisy`, and from which on it is probably
noisy. Of 61 meshes, sampled evenly with 2,048 points, 56 have less and 5, with thin plates or
holes, more than both. With noise of 0.5 % of the radius 30 have much, one has little; with 1 % 60
have much. With 0.25 % the distance to the surface is alike, with 0.5 % `noisy` has 7 / 10 of it.
"""
_NUM_NEIGHBORS = 20
_NUM_SPACING = 6
_NUM_AROUND = 16
_MOST_BLOCKS, _MOST_POINTS = 8, 16_000
_SMOOTHEST = 0.1
# What is measured on a sphere, as a share of the standard deviation of its noise: 0.40 to 0.46 for
# noise of 0.05 to 0.4 spacings.
_SHARE = 0.4
_NOTHING = float(np.finfo(float).tiny)  # Stands for the distance 0.


class Scatter(NamedTuple):
    """Estimated standard deviation of the noise of points along normals, `in_spacings` and as a
    `length` in the unit of their store."""

    in_spacings: float
    length: float

    @property
    def is_little(self) -> bool:
        """Whether `shapes` suits the points better than `noisy`."""
        return 0 < self.in_spacings < LITTLE_SCATTER

    def share_of_radius(self, store: Store) -> float:
        """The length as a share of the largest distance of a point from the middle of the box
        around all, the radius of a shape."""
        middle = (store.low.min(axis=0) + store.high.max(axis=0)) / 2
        positions = (store.read_block(block)["position"] for block in range(store.num_blocks))
        return self.length / max(
            float(np.linalg.norm(points - middle, axis=1).max()) for points in positions
        )


def scatter_of(store: Store) -> Scatter:
    """Scatter of a cloud.

    It is estimated at the smoothest tenth of the places, so that edges and thin parts of a shape do
    not count: noise is everywhere. A place is a point with its nearest points; what counts is their
    median distance, each to a quadric fitted to the other points around it. Up to eight blocks
    with 16,000 points, spread over the cloud, stand for all. 0 for fewer than 21 points, which are
    too few to fit. It is estimated once for a store.
    """
    if store not in _ESTIMATED:
        _ESTIMATED[store] = _estimated(store)
    return _ESTIMATED[store]


def has_little_noise(store: Store, options: UpsampleOptions) -> bool:
    """Whether the points of a shape have so little noise that `shapes` suits them better than
    `noisy`; False for a survey."""
    return not options.above_ground and scatter_of(store).is_little


_ESTIMATED: WeakKeyDictionary[Store, Scatter] = WeakKeyDictionary()


def _estimated(store: Store) -> Scatter:
    if len(store) <= _NUM_NEIGHBORS:
        return Scatter(0.0, 0.0)
    most = max(1, _MOST_POINTS * store.num_blocks // len(store))
    blocks = spread(store.num_blocks, min(_MOST_BLOCKS, most))
    found = [_off_surface(store, block) for block in blocks.tolist()]
    of_places, spacing = map(np.concatenate, zip(*found, strict=True))
    in_spacings = float(np.quantile(of_places, _SMOOTHEST)) / _SHARE
    return Scatter(in_spacings, in_spacings * float(np.median(spacing)))


def _off_surface(store: Store, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Of each point of a block: the median distance of the points around it to their surfaces, in
    spacings; and of these points the spacings."""
    region = Region(store, block, block + 1)
    own = region.places(block)
    _, around = region.neighbors_of(own, _NUM_AROUND)
    places, index = np.unique(around, return_inverse=True)
    distance, near = region.neighbors_of(places, _NUM_NEIGHBORS + 1)
    distance = np.maximum(distance[:, 1:], _NOTHING)
    near = region.rows["position"][near]
    spacing, reach = distance[:, :_NUM_SPACING].mean(axis=1), distance[:, -1]
    frame, _ = principal_axes(near[:, 1:], distance)
    height, _ = surface_height((near[:, 1:] - near[:, :1]) @ frame, 1.05 * reach)
    # Of points closer than the step of the grid nothing is known.
    of_points = np.abs(height) * (distance[:, _NUM_SPACING - 1] > _NOTHING) / spacing
    return np.median(of_points[index.reshape(around.shape)], axis=1), spacing
