"""Compares simulated scans of a forest with a real pair of surveys, for docs/results.md.

    python docs/simulated_scans.py ALS.laz DRONE.laz docs/simulated_scans.png [--scenes 6]
        [--movement 0.7]

Both files are LAS or LAZ with return numbers and ground classes. Stands of the height of the real
forest are scanned at the pulse density of the real surveys.
Prints a Markdown table and draws cross-sections and height profiles.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

import laspy
import matplotlib.pyplot as plt
import numpy as np
from scipy.spatial import cKDTree

from pointup.evaluation.common_extent import find_ground, whole_extent
from pointup.synthetic.landscapes import MARGIN, Stand, ground, plant_stand, scene_of
from pointup.synthetic.scanner import Scanner, airborne, drone, scan
from pointup.synthetic.scene_pairs import moved
from pointup.synthetic.site import Site

BANDS = (-np.inf, 2.0, 8.0, 16.0, 24.0, np.inf)
BAND_NAMES = ("below 2 m", "2 to 8 m", "8 to 16 m", "16 to 24 m", "above 24 m")
STAND = Stand(
    height=40.0,
    evenness=0.5,
    cover=2.0,
    understory=2.2,
    conifers=0.0,
    foliage=1.0,
    shrubs=0.03,
    dead_wood=0.01,
)
WIDTH = 20.0


@dataclass(frozen=True)
class Survey:
    """Points (N, 3), heights above ground (N,), return numbers (N,), area in square metres."""

    points: np.ndarray
    above: np.ndarray
    number: np.ndarray
    area: float

    @property
    def first(self) -> np.ndarray:
        return self.number == 1


def real_surveys(paths: list[Path]) -> list[Survey]:
    """Both surveys, with heights above the ground points of both."""
    files = [laspy.read(path) for path in paths]
    clouds = [np.array(file.xyz) for file in files]
    together = np.concatenate(clouds)
    classes = np.concatenate([np.array(file.classification) for file in files])
    below = find_ground(together, whole_extent(together, 1.0), classes)
    area = float(np.prod(np.ptp(together[:, :2], axis=0)))
    return [
        Survey(cloud, below.above(cloud), np.array(file.return_number), area)
        for file, cloud in zip(files, clouds, strict=True)
    ]


def flight(survey: Survey, scanner: Scanner, tilts: list[float]) -> Scanner:
    """The scanner with the pulse density of a real survey, on lines with these angles (degrees)."""
    headings = 0.3 + np.pi * np.arange(len(tilts))
    return replace(
        scanner,
        density=float(survey.first.sum() / survey.area),
        headings=headings,
        tilts=np.radians(tilts),
        max_returns=int(survey.number.max()),
    )


def simulated_surveys(real: list[Survey], num_scenes: int, movement: float) -> list[Survey]:
    """Scans of several stands, side by side, as one survey each."""
    parts: list[list[Survey]] = [[], []]
    for seed in range(num_scenes):
        rng = np.random.default_rng([77, seed])
        site = Site(rng, ground(rng), WIDTH + 2 * MARGIN)
        plant_stand(site, STAND)
        later = moved(site, movement, np.random.default_rng([78, seed]))
        scenes = scene_of(site, WIDTH), scene_of(later, WIDTH)
        aeroplane = flight(real[0], airborne(rng, 1.0), [12.0, -12.0])
        copter = flight(real[1], drone(rng, 1.0), [8.0])
        for side, (scene, scanner) in enumerate(zip(scenes, (aeroplane, copter), strict=True)):
            returns = scan(scene.solid, scene.rough, WIDTH, scanner, rng)
            above = returns.points[:, 2] - scene.ground(returns.points[:, :2])
            apart = returns.points + np.array([3 * WIDTH * seed, 0, 0])
            parts[side].append(Survey(apart, above, returns.number, WIDTH**2))
    names = ("points", "above", "number")
    return [
        Survey(
            *(np.concatenate([getattr(part, name) for part in side]) for name in names),
            area=num_scenes * WIDTH**2,
        )
        for side in parts
    ]


def describe(survey: Survey, other: Survey) -> dict[str, list[float]]:
    """Rows of the table: figures of a survey, and distances to the other one."""
    first, pulses = survey.first, survey.first.sum()
    band = np.digitize(survey.above, BANDS) - 1
    away = np.asarray(cKDTree(other.points).query(survey.points)[0])
    numbers = range(len(BAND_NAMES))
    return {
        "points/m2": [len(first) / survey.area],
        "pulses/m2": [pulses / survey.area],
        "returns of a pulse": [len(first) / pulses],
        "returns within 0.5 m of the ground, %": [100 * float(np.mean(survey.above < 0.5))],
        f"returns {', '.join(BAND_NAMES)}, %": [100 * float(np.mean(band == n)) for n in numbers],
        "first returns, the same, %": [100 * float(np.mean(band[first] == n)) for n in numbers],
        "to the other survey, by height, m": [float(away[band == n].mean()) for n in numbers],
        "to the other survey, m": [float(away.mean())],
    }


def print_table(real: list[Survey], simulated: list[Survey]) -> None:
    columns = [
        describe(surveys[side], surveys[1 - side])
        for side in (0, 1)
        for surveys in (real, simulated)
    ]
    titles = ["aeroplane", "simulated", "drone", "simulated"]
    print(f"| | {' | '.join(titles)} |\n|---|{'---:|' * len(titles)}")
    for row in columns[0]:
        cells = [", ".join(f"{value:.3g}" for value in column[row]) for column in columns]
        print(f"| {row} | {' | '.join(cells)} |")


def draw(real: list[Survey], simulated: list[Survey], path: Path) -> None:
    """Cross-sections of 20 m by 2 m of the four surveys, and the profiles of heights."""
    figure, axes = plt.subplots(1, 5, figsize=(13, 5.2), sharey=True, width_ratios=[3, 3, 3, 3, 4])
    titles = ("aeroplane", "simulated aeroplane", "drone", "simulated drone")
    surveys = (real[0], simulated[0], real[1], simulated[1])
    for axis, title, survey, start in zip(axes, titles, surveys, (40, 0) * 2, strict=False):
        low = survey.points.min(axis=0) + np.array([start, 0, 0])
        along, aside = (survey.points - low)[:, :2].T
        chosen = (along > 0) & (along < 20) & (np.abs(aside - 2.5) < 1)
        height = survey.above[chosen]
        axis.scatter(along[chosen], height, s=0.7, c=height, cmap="viridis", vmin=0, vmax=38)
        axis.set(title=title, xlabel="m", aspect="equal", xlim=(0, 20), ylim=(-1, 42))
    axes[0].set_ylabel("height above ground, m")
    for side, color in ((0, "tab:blue"), (1, "tab:orange")):
        for survey, dashes in ((real[side], "-"), (simulated[side], ":")):
            share, edges = np.histogram(survey.above, np.arange(-1, 42, 1))
            label = ("aeroplane", "drone")[side] + (", simulated" if dashes == ":" else "")
            middles = (edges[1:] + edges[:-1]) / 2
            axes[4].plot(100 * share / share.sum(), middles, dashes, color=color, label=label)
    axes[4].set(title="profile", xlabel="% of returns per metre")
    axes[4].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=75)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("als", type=Path)
    parser.add_argument("drone", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--scenes", type=int, default=6)
    parser.add_argument("--movement", type=float, default=0.0, help="of the plants, in metres")
    options = parser.parse_args()
    real = real_surveys([options.als, options.drone])
    simulated = simulated_surveys(real, options.scenes, options.movement)
    print_table(real, simulated)
    draw(real, simulated, options.picture)


if __name__ == "__main__":
    main()
