"""Attributes of new points, interpolated from the measured points around them."""

from __future__ import annotations

import numpy as np

from pointup.io.cloud import SYNTHETIC, ExtraDimension, PointCloud, plain_name
from pointup.upsampling.ground import GROUND_CLASS, Ground, class_attribute

PARENT, DISTANCE = "parent_index", "distance_to_measured"
"""Attributes that an upsampled cloud has in addition to `SYNTHETIC`, which is 1 for a new point and
0 for a measured one: the index of the parent point in the input; the distance to the nearest
measured point."""
UNCERTAINTY = "uncertainty"
"""Attribute of new points: the distance to the true surface that nine in ten of those with this
value stay within; 0 for measured points."""
PARENT_TYPE = np.dtype(np.uint32)

NUM_NEIGHBORS = 3
"""Number of measured points that an attribute is interpolated from."""

UNCLASSIFIED = 1
# Never classified, unclassified, and low, medium and high vegetation.
_MAY_BE_GROUND = (0, 1, 3, 4, 5)
# A step is steep if it rises by more than _FLAT cell sides plus _STEEP times its length.
_FLAT, _STEEP = 0.2, 0.5

INTERPOLATED = frozenset(
    {"intensity", "red", "green", "blue", "nir", "r", "g", "b", "rgb", "rgba", "color", "colors"}
)
"""Attributes that are interpolated."""

OF_MEASUREMENTS = frozenset({"keypoint", "edgeofflightline", "wavepacketindex"})
"""Attributes, without underscores, that are 0 for all new points: flags of chosen measured points,
which filters keep, as terrain models from key points do, and the index that says whose waveform
was recorded."""

_OF_SEVERAL_CHANNELS = frozenset({"rgb", "rgba", "color", "colors"})


def attributes_between(
    attributes: np.ndarray, distance: np.ndarray, nearest: np.ndarray
) -> np.ndarray:
    """Attributes of Q points, interpolated from their neighbours: a structured array (Q,).

    Attributes of `INTERPOLATED` are means, those of `OF_MEASUREMENTS` are 0, and all others are
    those of the nearest point.
    Weights are proportional to the inverse distance; values that are not numbers have none, as long
    as another neighbour has a value. A colour that is packed into one number is
    copied from the nearest. distance: (Q, k) ascending, to the rows `nearest` (Q, k) of the
    structured array `attributes`; with fewer than k neighbours, the rest is inf and -1.
    """
    interpolated = attributes[nearest[:, 0]]
    distance = np.maximum(distance, 1e-9)
    weight = distance[:, :1] / distance
    weight /= weight.sum(axis=1, keepdims=True)
    for name in interpolated.dtype.names or ():
        # A colour in a single number is packed: the mean of two of them is a colour of neither.
        known = plain_name(name)
        if known.replace("_", "") in OF_MEASUREMENTS:
            interpolated[name] = 0
        is_packed = known in _OF_SEVERAL_CHANNELS and not interpolated.dtype[name].shape
        if known in INTERPOLATED and not is_packed:
            values = attributes[name][nearest].astype(np.float64)
            mean = _weighted_mean(weight, values, nearest >= 0)
            kind = interpolated.dtype[name].base.kind
            interpolated[name] = np.rint(mean) if kind in "iub" else mean
    return interpolated


def _weighted_mean(weight: np.ndarray, values: np.ndarray, found: np.ndarray) -> np.ndarray:
    """Means (Q, ...) of values (Q, k, ...) by weights (Q, k), of the finite ones that are found."""
    shape = (*weight.shape, *[1] * (values.ndim - 2))
    known = np.isfinite(values) & found.reshape(shape)
    weights = np.where(known, weight.reshape(shape), 0.0)
    with np.errstate(invalid="ignore"):
        # 0 / 0 is not a number: no neighbour has a value.
        return np.where(known, weights * values, 0.0).sum(axis=1) / weights.sum(axis=1)


def classify_ground(
    attributes: np.ndarray,
    rows: np.ndarray,
    nearest: np.ndarray,
    ground: Ground,
    points: np.ndarray,
) -> None:
    """Correct the classes of new points (Q, 3) in place, in their `attributes` (Q,).

    A point on the ground gets class 2 instead of vegetation or no class. A point of class 2 off the
    ground gets the class of the nearest non-ground point among `nearest` (Q, k) of `rows` of a
    store, or 1 (unclassified) if there is none. Where too few points of class 2 are near to fit the
    ground, a point loses class 2 if the step from its nearest measured point is steep.
    """
    name = class_attribute(attributes.dtype)
    if name is None:
        return
    own, around = attributes[name], rows["attributes"][name][nearest]
    is_ground, is_known = ground.is_on_surface(points)
    x, y, z = np.abs(points - rows["position"][nearest[:, 0]]).T
    is_steep = z > _FLAT * ground.side + _STEEP * np.hypot(x, y)
    is_off = np.where(is_known, ~is_ground, is_steep)
    others = around != GROUND_CLASS
    first = others.argmax(axis=1)
    other = np.where(
        others.any(axis=1), np.take_along_axis(around, first[:, None], 1)[:, 0], UNCLASSIFIED
    )
    attributes[name] = np.where(
        is_ground & np.isin(own, _MAY_BE_GROUND),
        GROUND_CLASS,
        np.where((own == GROUND_CLASS) & is_off, other, own),
    )


def added_dimensions(
    like: PointCloud, has_uncertainty: bool, unit: str = ""
) -> list[ExtraDimension]:
    """The attributes that an upsampled cloud has in addition to those of the input `like`, whose
    coordinates are in `unit`."""
    added = [
        ExtraDimension(PARENT, PARENT_TYPE.name, "index of the point it came from", "index"),
        ExtraDimension(DISTANCE, "f4", "to the nearest measured point"),
    ]
    if has_uncertainty:
        described = f"90 % lie within, in {unit or 'file units'}"
        added.append(ExtraDimension(UNCERTAINTY, "f4", described))
    if SYNTHETIC not in like.attributes:
        added.insert(0, ExtraDimension(SYNTHETIC, "u1", "1 for a point that was made"))
    return added
