"""Planning of `pointup upsample`: the notes on files on top of each other."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pointup.cli.upsample.plan import UpsamplePlan, plan_jobs, plan_surveys
from pointup.io.cloud import PointCloud
from pointup.io.files import write_points

PLACE = np.array([5e5, 4e6, 0.0])


def plan_of(folder: Path, *names: str) -> UpsamplePlan:
    """The plan for files of random points on one square of 10 m."""
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        points = 10 * np.random.default_rng(number).random((400, 3))
        write_points(folder / name, PointCloud(np.round(points, 2) + PLACE))
    jobs, complaints = plan_jobs([folder], folder.parent / "dense", "lidar")
    assert not complaints
    return plan_surveys(jobs, separate=False)


def test_surveys_of_one_place_in_one_folder_are_reported(tmp_path):
    plan = plan_of(tmp_path / "all", "2021.las", "2022.las", "2023.las")
    assert [len(survey) for survey in plan.surveys] == [1, 1, 1]
    (note,) = plan.notes
    assert "2021.las and 2 more lie over each other" in note and "apart" in note


def test_surveys_of_one_place_in_folders_of_their_own_are_reported(tmp_path):
    plan = plan_of(tmp_path / "all", "2021/a.las", "2022/a.las")
    assert [len(survey) for survey in plan.surveys] == [1, 1]
    (note,) = plan.notes
    assert "each folder is taken for a survey" in note


def test_shapes_on_top_of_each_other_are_nothing_to_report(tmp_path):
    plan = plan_of(tmp_path / "all", "chair.ply", "lamp.ply")
    assert [len(survey) for survey in plan.surveys] == [1, 1]
    assert plan.notes == []
