"""Movement of plants between two surveys: wind, growth, new leaves. Metres, z up."""

from __future__ import annotations

from copy import copy

import numpy as np

from pointup.synthetic.randomness import displace
from pointup.synthetic.site import Site

# Height above the ground from which plants move by the full distance.
_FULL_HEIGHT = 10.0
# Share of the movement at the ground: leaves of shrubs are those of another year, too.
_AT_GROUND = 0.3
# Shares of the movement that a branch and its leaves make together, and that each leaf makes by
# itself. The sum of their squares is 1.
_OF_BRANCH, _OF_LEAF = 0.8, 0.6
# Length over which branches move alike.
_LENGTH = 2.5


def moved(site: Site, distance: float, rng: np.random.Generator) -> Site:
    """The site at another time: every plant has moved, everything else is where it was.

    `distance` is the root mean square displacement of leaves 10 m and more above the ground, in
    metres; it decreases towards the ground. Wood moves with the branches around it. Two surveys of
    one forest are never taken at the same time: wind and growth move branches, and leaves grow
    anew.
    """
    later = copy(site)
    later.solid, later.rough = list(site.solid), list(site.rough)
    for plant in site.plants:
        seed = int(rng.integers(2**63))
        wood, foliage = site.solid[plant.wood], site.rough[plant.foliage]
        later.solid[plant.wood] = _bent(wood, plant.foot, distance, seed)
        # All corners of a leaf move alike.
        middle = foliage.mean(axis=1, keepdims=True)
        of_leaf = rng.normal(size=middle.shape) * distance * _OF_LEAF / 3**0.5
        shift = _bent(middle, plant.foot, distance, seed) - middle
        shift += of_leaf * _share(middle, plant.foot)
        later.rough[plant.foliage] = foliage + shift
    return later


def _bent(points: np.ndarray, foot: np.ndarray, distance: float, seed: int) -> np.ndarray:
    """Points (..., 3) of a plant, moved with its branches; equal points stay equal."""
    moving = displace(
        points,
        np.random.default_rng(seed),
        2 * np.pi / _LENGTH / 3**0.5,
        distance * _OF_BRANCH / 3**0.5,
    )
    return points + (moving - points) * _share(points, foot)


def _share(points: np.ndarray, foot: np.ndarray) -> np.ndarray:
    """Share (..., 1) of the full displacement that points (..., 3) of a plant make."""
    height = points[..., 2:] - foot[2]
    return _AT_GROUND + (1 - _AT_GROUND) * (height / _FULL_HEIGHT).clip(0.0, 1.0)
