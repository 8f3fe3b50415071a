"""The surveys that a model and the baselines make of a source, and their numbers of points."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pointup import Upsampler
from pointup.evaluation.baselines import BASELINES
from pointup.evaluation.lidar import Survey, upsampled_surveys


def plane(num_points: int, side: float) -> Survey:
    """Random points of a square in the xy plane."""
    xy = np.random.default_rng(0).random((num_points, 2)) * side
    return Survey(Path("plane.las"), np.column_stack([xy, np.zeros(num_points)]), None)


@pytest.mark.parametrize("largest", [8.0, 64.0])
def test_at_a_density_the_baselines_have_as_many_points_as_the_model(largest: float) -> None:
    source = plane(200, 10)
    # 2 points per unit of area become 80: 40 of one, which the model makes if its limit allows it.
    # By default the limit is 16.
    upsampler = Upsampler(max_pass_ratio=largest, feature_dim=8, heads=2, child_heads=2, k=6)
    surveys = upsampled_surveys(source, 1.0, 80.0, upsampler)
    assert len(surveys["model"]) == pytest.approx(200 * min(40, max(16, largest)), rel=0.25)
    # Midpoints have 12 neighbours and this model 6, so that their numbers differ a little.
    assert len(surveys["midpoints"]) == pytest.approx(len(surveys["model"]), rel=0.2)
    for name in BASELINES:
        assert len(surveys[name]) == len(surveys["model"])


def test_without_a_model_the_baselines_have_as_many_points_as_the_midpoints() -> None:
    surveys = upsampled_surveys(plane(100, 10), 3.0)
    assert list(surveys) == ["midpoints", *BASELINES]
    assert {len(points) for points in surveys.values()} == {300}
