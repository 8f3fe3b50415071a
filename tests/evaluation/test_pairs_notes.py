"""Remarks of pointup evaluate pairs on pairs whose source lies on the true surface."""

from __future__ import annotations

import pytest

from pointup.cli.evaluate.pair_notes import remarks_on_pairs
from pointup.evaluation.cloud_metrics import METRICS, mean_rows
from pointup.evaluation.lidar_metrics import worse_than_source


def pair(p2f_of_source: float, p2f_of_model: float, cv: float = 0.2) -> dict[str, dict[str, float]]:
    return {
        "model": {"chamfer": 0.06, "p2f": p2f_of_model, "spacing_cv": cv},
        "source": {"chamfer": 0.09, "p2f": p2f_of_source, "spacing_cv": 0.3},
    }


def test_the_distance_to_the_surface_is_not_compared_with_that_of_a_source_on_it() -> None:
    (remark,) = remarks_on_pairs([pair(7e-6, 5.2), pair(8e-6, 5.4)], METRICS)
    assert remark == "model: no figure is much worse than the source's"
    (remark,) = remarks_on_pairs([pair(7e-6, 5.2, cv=0.6)], METRICS)
    assert remark == "model, much worse than the source: Spacing CV 0.6000, not 0.3000 (+100%)"


@pytest.mark.parametrize("noise", [0.8, 8.0, 22.0])
def test_the_distance_to_the_surface_of_noisy_sources_is_compared(noise: float) -> None:
    noisy = [pair(noise, 4 * noise)] * 2
    remarks = remarks_on_pairs(noisy, METRICS)
    assert remarks == worse_than_source(mean_rows(noisy), METRICS, ["model"])
    assert "P2F" in remarks[0] and "(4 times)" in remarks[0]


def test_of_mixed_pairs_only_those_with_noise_are_compared_and_counted() -> None:
    mixed = [pair(7e-6, 40.0), pair(8.0, 10.0), pair(8.0, 10.0)]
    (remark,) = remarks_on_pairs(mixed, METRICS)
    assert remark == (
        "model, much worse than the source: P2F in the 2 pairs whose source is not on the surface: "
        "10 x1e-3, not 8 x1e-3 (+25%)"
    )
