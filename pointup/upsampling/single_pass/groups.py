"""Groups of points that are near enough to each other for coordinates in float32."""

from __future__ import annotations

import numpy as np

from pointup.upsampling.store.bisection import split_boxes
from pointup.upsampling.store.region import Region

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
    return [slice(*ends) for ends in zip(starts, [*starts[1:], len(core)], strict=True)]
