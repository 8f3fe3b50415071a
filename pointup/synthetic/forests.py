"""Forest stands: canopy trees, understory, shrubs and dead wood on a site. Metres."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from pointup.synthetic.plants import broadleaf, conifer, log, shrub, snag
from pointup.synthetic.randomness import log_uniform
from pointup.synthetic.site import Site


@dataclass(frozen=True)
class Stand:
    """The composition of a forest stand.

    Attributes:
        height: height of the tallest trees.
        evenness: height of the smallest trees of the canopy, as a share of that of the tallest.
        cover: area of all crowns of the canopy divided by that of the ground.
        understory: the same for the smaller trees below the canopy.
        conifers: share of the trees that are conifers, which keep their needles.
        foliage: leaves of broadleaf trees and shrubs, as a share of those in summer. About 0.15 of
            twigs remain in winter.
        shrubs: shrubs per square metre.
        dead_wood: fallen and dead standing trunks per square metre.
    """

    height: float
    evenness: float
    cover: float
    understory: float
    conifers: float
    foliage: float
    shrubs: float
    dead_wood: float


def random_stand(rng: np.random.Generator, conifers: float, leaf_on: bool) -> Stand:
    """A random stand, from a young or open one to an old, closed one with several layers."""
    return Stand(
        height=log_uniform(rng, 8, 38),
        evenness=rng.uniform(0.3, 0.85),
        cover=rng.uniform(0.4, 2.2),
        understory=log_uniform(rng, 0.1, 2.0),
        conifers=conifers,
        foliage=1.0 if leaf_on else rng.uniform(0.1, 0.22),
        shrubs=log_uniform(rng, 0.003, 0.1),
        dead_wood=log_uniform(rng, 0.002, 0.03),
    )


def plant_stand(site: Site, stand: Stand) -> None:
    """Plant a stand on a site, from the canopy downwards."""
    rng, area, top = site.rng, site.extent**2, stand.height
    # Tall trees stand close in some stands and have wide crowns in others.
    spread = rng.uniform(0.6, 1.3)
    layers = (
        (stand.cover, stand.evenness, 1.0),
        (stand.understory, 0.08, max(0.7 * stand.evenness, 0.3)),
    )
    for cover, low, high in layers:
        # Crowns overlap those of the same layer only in part, and lie below those of a taller one.
        site.clear()
        planted = 0.0
        while planted < cover * area:
            height = max(top * rng.uniform(low, high), 1.5)
            radius = 0.2 * spread * height
            evergreen = rng.random() < stand.conifers
            kind, leafy = (conifer, 1.0) if evergreen else (broadleaf, stand.foliage)
            make = partial(kind, rng, height, leafy, spread)
            if not site.grow(make, clearance=0.45 * radius):
                break
            planted += np.pi * radius**2
    for _ in range(rng.poisson(area * stand.shrubs)):
        size = log_uniform(rng, 0.4, 3)
        site.grow(partial(shrub, rng, size, stand.foliage), clearance=0.2)
    for _ in range(rng.poisson(area * stand.dead_wood)):
        if rng.random() < 0.7:
            site.lay(log(rng))
        else:
            site.put(snag(rng, top * rng.uniform(0.1, 0.7)), clearance=0.3, reach=1.0)
