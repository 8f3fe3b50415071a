"""Planes and quadrics fitted to the neighbours of points (moving least squares).

See Alexa et al., "Computing and rendering point set surfaces", 2003.
"""

from __future__ import annotations

import numpy as np

# The weights of a fit decrease to exp(-value) at the last neighbour.
_PLANE_FALL, _QUADRIC_FALL = 4.0, 5.0
# Ridge terms against underdetermined fits, with the distance of the furthest neighbour as unit. The
# term of the height is small, since it would keep a point where it is. The others are invariant
# under rotation of x and y.
_RIDGE = (1e-9, 1e-3, 1e-3, 1e-3, 5e-4, 1e-3)


def principal_axes(around: np.ndarray, distance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Principal axes (Q, 3, 3) of points (Q, K, 3) at `distance` (Q, K): normal, narrow, long.

    And the variances (Q, 3) along them, up to a common factor.
    """
    weight = np.exp(-_PLANE_FALL * np.square(distance / distance[:, -1:]))
    mean = np.einsum("qk,qki->qi", weight, around) / weight.sum(axis=1, keepdims=True)
    away = around - mean[:, None]
    covariance = (away * weight[..., None]).transpose(0, 2, 1) @ away
    variance, frame = np.linalg.eigh(covariance)
    return frame, variance


def surface_height(
    around: np.ndarray, scale: np.ndarray, factor: np.ndarray | float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Height (Q,) at the origin of the surface through the points `around` (Q, K, 3), and the
    weighted root mean square (Q,) of their distances to it along the normal.

    The surface is z = a + bx + cy + dxx + exy + fyy, fitted by weighted least squares. The first
    coordinate of the points is the height. scale: (Q,), about the distance of the furthest point.
    factor: (Q, K), additional weight of each point.
    """
    z, y, x = np.moveaxis(around / scale[:, None, None], 2, 0)
    weight = factor * np.exp(-_QUADRIC_FALL * (x * x + y * y + z * z))
    terms = np.stack([np.ones_like(x), x, y, x * x, x * y, y * y], axis=2)
    weighted = (terms * weight[..., None]).transpose(0, 2, 1)
    fitted = np.linalg.solve(weighted @ terms + np.diag(_RIDGE), weighted @ z[..., None])
    off = z - (terms @ fitted)[..., 0]
    residual = np.sqrt((weight * off * off).sum(axis=1) / weight.sum(axis=1))
    return scale * fitted[:, 0, 0], scale * residual
