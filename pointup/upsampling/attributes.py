"""Attributes of new points, from the measured ones around them."""

from __future__ import annotations

import numpy as np

from pointup.data.clouds import ExtraDimension, PointCloud

SYNTHETIC, PARENT, DISTANCE = "synthetic", "parent_index", "distance_to_measured"
"""Attributes that tell new points from measured ones: 1 for a new point; the place in the cloud of
the point that it was made from; how far it is from the nearest one."""

NUM_NEIGHBORS = 3
"""Measured points that interpolated attributes are made from."""

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


def added_dimensions(like: PointCloud) -> list[ExtraDimension]:
    """What an upsampled cloud has beside the attributes of the cloud it was made from."""
    added = [
        ExtraDimension(PARENT, "u4", "index of the point it came from", "index"),
        ExtraDimension(DISTANCE, "f4", "to the nearest measured point"),
    ]
    if SYNTHETIC not in like.attributes:
        added.insert(0, ExtraDimension(SYNTHETIC, "u1", "1 for a point that was made"))
    return added
