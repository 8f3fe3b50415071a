"""Pairs of simulated surveys, from an aeroplane and from a drone; plants move in between."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

import numpy as np

from pointup.datasets.pair import Pair
from pointup.errors import DataError
from pointup.geometry.surfaces import Surface
from pointup.synthetic.fields import displace, log_uniform
from pointup.synthetic.landscapes import KINDS, random_site, scan, scene_of
from pointup.synthetic.site import Site

# Increase this number with each change of the pairs.
RECIPE = 4
# Keeps these scenes apart from those of the default dataset with the same seed.
SERIES = 5_001
MIN_POINTS = 32
ATTEMPTS = 20


@dataclass(frozen=True)
class SurveyPlan:
    """What is surveyed, and how densely.

    Attributes:
        width: side length of the square tile, in metres.
        source_density: smallest and largest number of source points per square metre.
        target_density: target points per square metre.
        ratios: target points for each source point, drawn from these; replaces `target_density`.
        kinds: kinds of landscape, in turn.
        movement: smallest and largest distance by which plants move between the two surveys, in
            metres, see `moved`.
    """

    width: float = 10.0
    source_density: tuple[float, float] = (6.0, 22.0)
    target_density: float = 300.0
    ratios: tuple[float, ...] = ()
    kinds: tuple[str, ...] = KINDS
    movement: tuple[float, float] = (0.0, 0.0)


def survey_pair(
    plan: SurveyPlan, seed: int, validation: bool, number: int
) -> tuple[Pair, Surface | None]:
    """A pair, and in validation its surface; both depend only on the arguments.

    The scenes of validation are other ones than those of training, whatever their seeds. Densities
    count returns and are met within a few per cent. Validation pairs have a second drone survey,
    independent of the first, of the plants as the first drone survey met them; so is the surface.
    """
    kind = plan.kinds[number % len(plan.kinds)]
    for attempt in range(ATTEMPTS):
        rng = np.random.default_rng([SERIES, seed, validation, number, attempt])
        density = log_uniform(rng, *plan.source_density)
        denser = plan.target_density
        if plan.ratios:
            denser = density * rng.choice(plan.ratios)
        site = random_site(rng, plan.width, kind)
        scene = scene_of(site, plan.width)
        source = scan(scene, density, rng, count_returns=True).points
        if plan.movement[1] > 0:
            scene = scene_of(moved(site, rng.uniform(*plan.movement), rng), plan.width)
        target = scan(scene, denser, rng, from_drone=True, count_returns=True)
        if min(len(source), len(target.points)) >= MIN_POINTS:
            break
    else:
        raise DataError(
            f"{kind}: {ATTEMPTS} scenes of {plan.width:g} m had fewer than {MIN_POINTS} points; "
            "give a larger tile or density"
        )
    name = f"{kind}_{'validation' if validation else 'train'}_{number:05d}"
    pair = Pair(
        name=name,
        source=source.astype(np.float32),
        target=target.points.astype(np.float32),
        target_normals=target.normals.astype(np.float32),
        vertical=True,
    )
    if not validation:
        return pair, None
    again = scan(scene, denser, rng, from_drone=True, count_returns=True)
    pair.resample, pair.surface = again.points.astype(np.float32), f"{name}.npz"
    surface = scene.surface()
    # Single precision is a micrometre here, and halves the file.
    return pair, Surface(surface.vertices.astype(np.float32).astype(np.float64), surface.faces)


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
    frequency, strength = 2 * np.pi / _LENGTH / 3**0.5, distance * _OF_BRANCH / 3**0.5
    moving = displace(points, np.random.default_rng(seed), frequency, strength)
    return points + (moving - points) * _share(points, foot)


def _share(points: np.ndarray, foot: np.ndarray) -> np.ndarray:
    """Share (..., 1) of the full displacement that points (..., 3) of a plant make."""
    height = points[..., 2:] - foot[2]
    return _AT_GROUND + (1 - _AT_GROUND) * (height / _FULL_HEIGHT).clip(0.0, 1.0)
