"""Remarks on figures that are much worse than the source's."""

import pytest

from pointup.evaluation.cloud_metrics import Metric
from pointup.evaluation.lidar_metrics import beside_baselines, gap_closed, worse_than_source

METRICS = {
    "hausdorff": Metric("Hausdorff", "m", ""),
    "below": Metric("below ground", "%", ""),
    "f": Metric("F-score", "%", "", better="higher"),
    "density": Metric("density", "points/m2", "", better=""),
    "farthest": Metric("farthest new point", "m", ""),
}
SOURCE = {"hausdorff": 1.0, "below": 0.2, "f": 60.0, "density": 10.0}


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({"hausdorff": 1.94}, "Hausdorff 1.940 m, not 1.000 m (+94%)"),
        ({"below": 0.8}, "below ground 0.8000 %, not 0.2000 % (+0.6 points)"),
        ({"f": 58.5}, "F-score 58.50 %, not 60.00 % (-1.5 points)"),
        (
            {"farthest": 41.3},
            "farthest new point 41.30 m, not the midpoint baseline's 2.20 m (18.8 times)",
        ),
    ],
)
def test_what_is_much_worse_is_named_with_both_figures(figures, words):
    rows = {"model": {**SOURCE, **figures}, "midpoints": {"farthest": 2.2}, "source": SOURCE}
    (sentence,) = worse_than_source(rows, METRICS, ["model", "prediction"])
    assert sentence == f"model, much worse than the source: {words}"


@pytest.mark.parametrize(
    "figures",
    [
        {"hausdorff": 1.09},
        {"hausdorff": 0.2},
        {"below": 0.29},
        {"below": 0.05},
        {"f": 59.5},
        {"f": 99.0},
        {"density": 80.0},
        {"farthest": 4.3},
        {"below": 0.25, "f": 59.1},
    ],
)
def test_what_is_a_little_worse_or_better_is_not_named(figures):
    rows = {"model": {**SOURCE, **figures}, "midpoints": {"farthest": 2.2}, "source": SOURCE}
    assert worse_than_source(rows, METRICS, ["model"]) == [
        "model: no figure is much worse than the source's"
    ]


def test_several_are_named_together_and_there_is_no_remark_without_a_source():
    rows = {"model": {"hausdorff": 2.0, "f": 10.0}, "source": SOURCE}
    (sentence,) = worse_than_source(rows, METRICS, ["model"])
    assert "Hausdorff 2 m, not 1 m" in sentence and "; F-score 10 %" in sentence
    assert worse_than_source({"model": rows["model"]}, METRICS, ["model"]) == []


def test_a_figure_that_was_zero_is_named_without_a_share():
    rows = {"model": {"hausdorff": 0.3}, "source": {"hausdorff": 0.0}}
    (sentence,) = worse_than_source(rows, METRICS, ["model"])
    assert sentence.endswith("Hausdorff 0.3000 m, not 0.0000 m")


def test_a_method_is_compared_with_the_best_baseline_and_the_midpoints():
    rows = {
        name: {"chamfer": value}
        for name, value in (
            ("model", 0.9),
            ("midpoints", 1.2),
            ("jitter", 1.0),
            ("plane", 1.5),
            ("source", 0.1),
        )
    }
    assert beside_baselines(rows, ["model"]) == [
        "Chamfer of the model: 90.0% of the best baseline's (jitter), "
        "75.0% of the midpoint baseline's"
    ]
    assert beside_baselines({"model": {"chamfer": 1.0}}, ["model"]) == []


@pytest.mark.parametrize(("chamfer", "share"), [(0.8, "50%"), (0.6, "100%"), (1.2, "-50%")])
def test_the_gap_to_a_second_survey_is_that_of_the_best_baseline(chamfer, share):
    rows = {
        name: {"chamfer": value}
        for name, value in (("model", chamfer), ("plane", 1.0), ("jitter", 2.0), ("resampled", 0.6))
    }
    (line,) = gap_closed(rows, ["model"])
    assert line == (
        f"the model closes {share} of the gap between the best baseline and the resampled ground "
        "truth"
    )


def test_without_a_gap_none_is_closed():
    rows = {"model": {"chamfer": 0.9}, "plane": {"chamfer": 1.0}, "resampled": {"chamfer": 1.1}}
    assert len(beside_baselines(rows, ["model"])) == 1
    assert gap_closed(rows, ["model"]) == []
