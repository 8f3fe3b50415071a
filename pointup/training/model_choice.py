"""Which model a run keeps: one must be better than the initial model, by more than noise."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Literal, TypedDict

import numpy as np
from scipy.spatial import cKDTree

from pointup.datasets.pair import is_within
from pointup.evaluation.cloud_metrics import METRICS
from pointup.evaluation.lidar_metrics import lidar_metrics

ChosenBy = Literal["chamfer", "hausdorff", "cd", "p2f", "ground_rmse", "canopy_rmse"]
"""Figures of which both a model and the midpoint baseline have one above 0; lower is better."""
SURVEY_FIGURES = (
    "beyond_0.5",
    "beyond_1",
    "below_ground",
    "ground_rmse",
    "canopy_rmse",
    "canopy_rmse_shifted",
    "canopy_bias_shifted",
)
"""Figures of surveys that a run reports beside the one it chooses by."""
FEWEST_PARTS = 16
"""With fewer validation pairs, each is divided into parts, so that a test is possible."""
SIGNIFICANCE = 0.05
"""Largest probability by which an evaluation may find a model better that is as good as the
initial one. One that is worse passes more rarely."""
LEAST_GAIN = 0.0005
"""Share by which a model must be better: a smaller one would be reported as -0.0 %."""
WORSE_BY = 0.01
"""Share by which a figure must be worse to be named."""


class MeasuredModel(TypedDict):
    """A model on the validation pairs, in the form that a checkpoint stores.

    `score` is the mean of the figure that the run chooses by, in units of the midpoint baseline's.
    `parts` holds this figure for the parts of each pair, by the pair's index. `figures` are means.
    """

    step: int
    score: float
    parts: dict[str, list[float]]
    figures: dict[str, float]


def parts_per_side(num_pairs: int) -> int:
    """The square root of the number of parts of each pair."""
    return math.ceil(math.sqrt(FEWEST_PARTS / max(num_pairs, 1)))


def chamfer_of_parts(
    cloud: np.ndarray, target: np.ndarray, per_side: int, core: np.ndarray | None = None
) -> list[float]:
    """The unsquared Chamfer distance of each of `per_side` ** 2 parts of a pair.

    The parts have equally many points of the target (M, 3). Columns divide x, then each column is
    divided along y. A point of the cloud (N, 3) belongs to the part of its nearest target point.
    Only points on the core (2, 2), if there is one, are measured and belong to parts.
    """
    trees = cKDTree(target), cKDTree(cloud)
    if core is not None:
        cloud, target = (points[is_within(points, core)] for points in (cloud, target))
    part = np.empty(len(target), np.int64)
    columns = np.array_split(np.argsort(target[:, 0], kind="stable"), per_side)
    cells = [
        cell
        for rows in columns
        for cell in np.array_split(rows[np.argsort(target[rows, 1], kind="stable")], per_side)
    ]
    for number, rows in enumerate(cells):
        part[rows] = number
    _, nearest = cKDTree(target).query(cloud)
    to_target, from_target = trees[0].query(cloud)[0], trees[1].query(target)[0]
    sums = np.zeros(len(cells))
    for distance, of in ((to_target, part[nearest]), (from_target, part)):
        count = np.bincount(of, minlength=len(cells)).clip(min=1)
        sums += np.bincount(of, distance, minlength=len(cells)) / count
    return [float(value) for value in sums]


def is_better(model: MeasuredModel, other: MeasuredModel) -> bool:
    """Whether a model is better than the other by more than noise.

    This is a one-sided paired t-test of the parts of the pairs that both have, at `SIGNIFICANCE`,
    of a gain of at least `LEAST_GAIN`. One part shows nothing.
    """
    from scipy.stats import ttest_1samp  # Takes half a second to import.

    both = sorted(model["parts"].keys() & other["parts"].keys())
    own, others = (
        np.concatenate([np.empty(0), *(each["parts"][pair] for pair in both)])
        for each in (model, other)
    )
    differences = own - others
    if len(differences) < 2 or differences.mean() > -LEAST_GAIN * others.mean():
        return False
    if not np.ptp(differences):
        return True
    return bool(ttest_1samp(differences, 0, alternative="less").pvalue < SIGNIFICANCE)


def outcome(
    name: str, chosen_by: ChosenBy, initial: MeasuredModel, kept: MeasuredModel | None
) -> str:
    """A sentence that says whether the model of a run is its initial model, called `name`, or how
    much better it is; with each figure that is more than `WORSE_BY` worse."""
    metrics = METRICS | lidar_metrics()
    title = metrics[chosen_by].title.removesuffix(", mean")
    parts = sum(map(len, initial["parts"].values()))
    num_pairs = len(initial["parts"])
    units = f"{num_pairs:,} validation pair{'s' * (num_pairs > 1)}"
    if parts > num_pairs:
        units = f"{parts:,} parts of {'the ' * (num_pairs > 1)}{units}"
    if kept is None or not kept["step"]:
        return (
            f"model/ holds the initial model {name}: on {units}, no step was better by more than "
            f"noise ({title}, as written; paired t-test, p < {SIGNIFICANCE:g})."
        )
    before, after = initial["figures"], kept["figures"]
    worse = [
        f"{metrics[figure].title} {after[figure]:.3g}, not {before[figure]:.3g}"
        for figure in worse_figures(before, after)
    ]
    return (
        f"model/ holds step {kept['step']:,}, better than the initial model {name} on {units}: "
        f"{title} {after[chosen_by]:.4g}, not {before[chosen_by]:.4g} "
        f"({after[chosen_by] / before[chosen_by] - 1:+.1%}, as written). "
        + (f"Worse: {'; '.join(worse)}." if worse else "No figure is worse.")
    )


def worse_figures(before: Mapping[str, float], after: Mapping[str, float]) -> Iterator[str]:
    """The figures that are more than `WORSE_BY` worse after than before; a bias by its size."""
    for name in ("chamfer", "hausdorff", "p2f", *SURVEY_FIGURES):
        if name in before and name in after:
            old, new = abs(before[name]), abs(after[name])
            if new > (1 + WORSE_BY) * old:
                yield name
