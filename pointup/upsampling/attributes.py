"""Attributes of new points, from the measured ones around them."""

from __future__ import annotations

import numpy as np

from pointup.io.cloud import ExtraDimension, PointCloud
from pointup.upsampling.ground import CLASSIFICATION, GROUND_CLASS, Ground

SYNTHETIC, PARENT, DISTANCE = "synthetic", "parent_index", "distance_to_measured"
"""Attributes that tell new points from measured ones: 1 for a new point; the place in the cloud of
the point that it was made from; how far it is from the nearest one."""

NUM_NEIGHBORS = 3
"""Measured points that interpolated attributes are made from."""

UNCLASSIFIED = 1
# Never classified, unclassified, and low, medium and high vegetation.
_MAY_BE_GROUND = (0, 1, 3, 4, 5)
# A way is steep that rises by more than so many sides of a cell, and so much of its length.
_FLAT, _STEEP = 0.2, 0.5

INTERPOLATED = frozenset(
    {"intensity", "red", "green", "blue", "nir", "r", "g", "b", "rgb", "rgba", "color", "colors"}
)
"""Attributes that are measured over an area; all others are taken from the nearest point."""


def attributes_between(
    attributes: np.ndarray, distance: np.ndarray, nearest: np.ndarray
) -> np.ndarray:
    """A structured array (Q,) of attributes for points between others.

    Weights go as the inverse of the distance. distance: (Q, k) ascending to the points `nearest`
    (Q, k) in the structured array `attributes`; where there are fewer than k, inf and -1.
    """
    made = attributes[nearest[:, 0]].copy()
    distance = np.maximum(distance, 1e-9)
    weight = distance[:, :1] / distance
    weight /= weight.sum(axis=1, keepdims=True)
    for name in made.dtype.names or ():
        if name.lower() in INTERPOLATED:
            values = attributes[name][nearest].astype(np.float64)
            mean = np.einsum("qk,qk...->q...", weight, values)
            kind = made.dtype[name].base.kind
            made[name] = np.rint(mean) if kind in "iub" else mean
    return made


def classify_ground(
    made: np.ndarray, nearest: np.ndarray, ground: Ground, points: np.ndarray
) -> None:
    """Correct the classes of new points (Q, 3), whose attributes `made` (Q,) are their nearest's.

    On the ground a point gets class 2 in place of vegetation or no class. Off it, it loses class 2
    for that of the nearest of another class among the measured points `nearest`, rows (Q, k) of a
    store, or 1, unclassified. Where too few points of class 2 are near to know the ground, it loses
    class 2 when the way to it from its nearest point is steep.
    """
    if CLASSIFICATION not in (made.dtype.names or ()):
        return
    own, around = made[CLASSIFICATION], nearest["attributes"][CLASSIFICATION]
    is_ground, is_known = ground.is_on_surface(points)
    x, y, z = np.abs(points - nearest["position"][:, 0]).T
    is_steep = z > _FLAT * ground.side + _STEEP * np.hypot(x, y)
    is_off = np.where(is_known, ~is_ground, is_steep)
    others = around != GROUND_CLASS
    first = others.argmax(axis=1)
    other = np.where(
        others.any(axis=1), np.take_along_axis(around, first[:, None], 1)[:, 0], UNCLASSIFIED
    )
    made[CLASSIFICATION] = np.where(
        is_ground & np.isin(own, _MAY_BE_GROUND),
        GROUND_CLASS,
        np.where((own == GROUND_CLASS) & is_off, other, own),
    )


def added_dimensions(like: PointCloud) -> list[ExtraDimension]:
    """What an upsampled cloud has beside the attributes of the cloud it was made from."""
    added = [
        ExtraDimension(PARENT, "u4", "index of the point it came from", "index"),
        ExtraDimension(DISTANCE, "f4", "to the nearest measured point"),
    ]
    if SYNTHETIC not in like.attributes:
        added.insert(0, ExtraDimension(SYNTHETIC, "u1", "1 for a point that was made"))
    return added
