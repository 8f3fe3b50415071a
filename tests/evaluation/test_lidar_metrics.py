"""Figures of surveys, by hand on small grids and by brute force."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointup.errors import DataError
from pointup.evaluation.common_extent import (
    Extent,
    common_extent,
    find_ground,
    whole_extent,
)
from pointup.evaluation.lidar import SurveyReference
from pointup.evaluation.lidar_metrics import Scale, band_metrics, lidar_metrics
from pointup.io.length_unit import METRE, LengthUnit, unit_of


def lattice(width: int, height: int, z: float = 0.0, step: float = 1.0) -> np.ndarray:
    """A point in the middle of each square of `step`, from (0, 0) on."""
    x, y = np.meshgrid(
        np.arange(0.5 * step, width, step), np.arange(0.5 * step, height, step), indexing="ij"
    )
    return np.column_stack([x.ravel(), y.ravel(), np.full(x.size, z)])


def whole(width: int, height: int, cell: float = 1.0) -> Extent:
    return Extent(cell, np.zeros(2), np.ones((width, height), dtype=bool))


def measure_survey(
    prediction: np.ndarray,
    reference: np.ndarray,
    extent: Extent,
    thresholds: tuple[float, ...] = (0.1, 0.25, 0.5),
    source: np.ndarray | None = None,
    unit: LengthUnit = METRE,
) -> dict[str, float]:
    scale = Scale(unit, extent.cell, thresholds)
    ground = find_ground(reference, extent, unit=unit)
    return SurveyReference(reference, extent, ground, source, scale).measure(prediction)


def test_distances_and_heights_of_a_raised_plane_are_those_computed_by_hand():
    reference, prediction = lattice(6, 4), lattice(6, 4, z=0.3)
    figures = measure_survey(prediction, reference, whole(6, 4))
    assert figures == pytest.approx(
        {
            "num_points": 24,
            "density": 1,
            "covered": 100,
            "to_reference": 0.3,
            "to_reference_median": 0.3,
            "from_reference": 0.3,
            "from_reference_median": 0.3,
            "chamfer": 0.6,
            "chamfer_median": 0.6,
            "hausdorff": 0.3,
            "f_score_0.1": 0,
            "f_score_0.25": 0,
            "f_score_0.5": 100,
            "beyond_0.5": 0,
            "beyond_1": 0,
            "below_ground_points": 0,
            "below_ground": 0,
            "gap_fraction_error": 0,
            "height_overlap": 100,
            "canopy_rmse": 0.3,
            "canopy_bias": 0.3,
            "ground_rmse": 0.3,
            "canopy_rmse_shifted": 0.3,
            "canopy_bias_shifted": 0.3,
            "ground_rmse_2m": 0.3,
            "ground_missed_2m": 0,
            "to_reference_0_2": 0.3,
            "from_reference_0_2": 0.3,
        }
    )
    # There is no source that a new point could be far from.
    assert lidar_metrics().keys() - figures.keys() == {"farthest_new", "beyond_1_anywhere"}
    assert figures.keys() <= lidar_metrics().keys() | band_metrics().keys()


def test_means_and_medians_of_both_directions_are_distinguished():
    reference = np.array([[0.5, 0.5, 0.0], [0.5, 0.5, 4.0], [0.5, 0.5, 5.0]])
    prediction = np.array([[0.5, 0.5, 0.2]])
    figures = measure_survey(prediction, reference, whole(1, 1))
    assert figures["to_reference"] == figures["to_reference_median"] == pytest.approx(0.2)
    assert figures["from_reference"] == pytest.approx((0.2 + 3.8 + 4.8) / 3)
    assert figures["from_reference_median"] == pytest.approx(3.8)
    assert figures["chamfer"] == pytest.approx(0.2 + 8.8 / 3)
    assert figures["chamfer_median"] == pytest.approx(4.0)


def test_f_score_is_the_harmonic_mean_of_precision_and_recall():
    reference = np.array([[0.5, 0.5, 0.0], [0.5, 0.5, 4.0], [0.5, 0.5, 5.0]])
    prediction = np.array([[0.5, 0.5, 0.2], [0.5, 0.5, 8.0]])
    figures = measure_survey(prediction, reference, whole(1, 1), thresholds=(0.25, 1.5))
    # Within 0.25: 1 of 2 predicted, 1 of 3 reference points.
    assert figures["f_score_0.25"] == pytest.approx(100 * 2 * (1 / 2) * (1 / 3) / (1 / 2 + 1 / 3))
    assert "f_score_1.5" in figures and "f_score_0.1" not in figures


def test_height_overlap_is_what_two_histograms_have_in_common():
    # Above ground 0: three quarters in the first metre, a quarter in the fourth.
    reference = np.array([[0.5, 0.5, z] for z in (0.0, 0.2, 0.9, 3.5)])
    # A half in the first metre, a half in the fourth.
    prediction = np.array([[0.5, 0.5, z] for z in (0.1, 0.5, 3.1, 3.9)])
    figures = measure_survey(prediction, reference, whole(1, 1))
    assert figures["height_overlap"] == pytest.approx(100 * (0.5 + 0.25))


def test_heights_are_measured_above_sloping_ground():
    ground = lattice(20, 3)
    ground[:, 2] = 0.2 * ground[:, 0]
    trees = ground + np.array([0, 0, 10])
    reference = np.concatenate([ground, trees])
    figures = measure_survey(np.concatenate([ground, trees]), reference, whole(20, 3))
    assert figures["height_overlap"] == pytest.approx(100)
    # The ground rises by four metres, yet all of it is in the lowest one.
    figures = measure_survey(ground, reference, whole(20, 3))
    assert figures["height_overlap"] == pytest.approx(50)


def test_canopy_and_ground_are_the_highest_and_lowest_points_of_the_grid():
    ground, canopy = lattice(20, 20), lattice(20, 20, z=15)
    reference = np.concatenate([ground, canopy])
    # The canopy is one metre too low in every second cell; some ground is not seen at all.
    lower = canopy - np.outer(np.arange(400) % 2, [0, 0, 1])
    prediction = np.concatenate([ground[::3], lower])
    figures = measure_survey(prediction, reference, whole(20, 20))
    assert figures["canopy_rmse"] == pytest.approx(np.sqrt(0.5))
    assert figures["ground_rmse"] == 0
    # A point below the ground is seen from the cells up to three away.
    figures = measure_survey(
        np.concatenate([prediction, [[10.5, 10.5, -2.0]]]), reference, whole(20, 20)
    )
    assert figures["ground_rmse"] == pytest.approx(np.sqrt(49 * 4 / 400))


def test_cells_without_predicted_points_are_counted_not_compared():
    reference = lattice(10, 10)
    figures = measure_survey(reference[:30] + np.array([0, 0, 2]), reference, whole(10, 10))
    assert figures["covered"] == pytest.approx(30)
    assert figures["canopy_rmse"] == pytest.approx(2)


def test_neighbours_beyond_the_extent_count_but_points_there_don_t():
    extent = Extent(1.0, np.zeros(2), np.ones((2, 1), dtype=bool))
    reference = np.array([[0.5, 0.5, 0.0], [2.1, 0.5, 0.0]])
    prediction = np.array([[1.9, 0.5, 0.0], [0.4, 0.5, 0.0], [9.5, 0.5, 0.0]])
    figures = measure_survey(prediction, reference, extent)
    assert figures["num_points"] == 2
    assert figures["to_reference"] == pytest.approx((0.2 + 0.1) / 2)
    assert figures["from_reference"] == pytest.approx(0.1)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=15)
def test_figures_of_surveys_far_from_the_origin_are_those_of_brute_force(seed):
    rng = np.random.default_rng(seed)
    move = np.array([5e5, 4e6, 100.0])
    source, reference, new = (rng.uniform(0, 5, (n, 3)) for n in (100, 200, 150))
    prediction = np.concatenate([source, new])
    extent = Extent(1.0, move[:2], np.ones((5, 5), dtype=bool))
    figures = measure_survey(prediction + move, reference + move, extent, source=source + move)
    distance = np.linalg.norm(prediction[:, None] - reference[None], axis=2)
    forward, backward = distance.min(axis=1), distance.min(axis=0)
    assert figures["to_reference"] == pytest.approx(forward.mean(), rel=1e-6)
    assert figures["from_reference_median"] == pytest.approx(np.median(backward), rel=1e-6)
    assert figures["hausdorff"] == pytest.approx(max(forward.max(), backward.max()), rel=1e-6)
    for far in (0.5, 1.0):
        assert figures[f"beyond_{far:g}"] == pytest.approx(100 * (forward[100:] > far).mean())
    difference = []
    for cell in np.ndindex(5, 5):
        tops = [
            cloud[(cloud[:, :2] // 1 == cell).all(axis=1), 2] for cloud in (prediction, reference)
        ]
        if len(tops[0]) and len(tops[1]):
            difference.append(tops[0].max() - tops[1].max())
    assert figures["canopy_rmse"] == pytest.approx(np.sqrt(np.mean(np.square(difference))))
    assert figures["canopy_bias"] == pytest.approx(np.mean(difference))


@given(st.integers(0, 2**32 - 1))
def test_a_survey_measured_against_itself_is_perfect(seed):
    rng = np.random.default_rng(seed)
    survey = rng.uniform(0, rng.integers(3, 9, 3), (int(rng.integers(60, 200)), 3))
    figures = measure_survey(survey, survey, common_extent({"survey": survey}))
    for name in ("chamfer", "hausdorff", "canopy_rmse", "ground_rmse", "beyond_0.5"):
        assert figures[name] == 0
    for name in ("covered", "height_overlap", "f_score_0.1"):
        assert figures[name] == pytest.approx(100)


def test_only_new_points_are_counted_far_off_and_below_the_ground():
    reference = source = lattice(10, 10)
    new = np.array([[5.0, 5, 0], [5, 5, 0.7], [5, 5, 2.5], [6, 6, -0.2], [6, 6, -0.4], [7, 7, -30]])
    prediction = np.concatenate([source, new])
    figures = measure_survey(prediction, reference, whole(10, 10), source=source)
    # The corners of a lattice's squares are 0.7071 from it.
    assert figures["beyond_0.5"] == pytest.approx(100)
    assert figures["beyond_1"] == pytest.approx(100 * 2 / 6)
    assert figures["below_ground_points"] == 2
    assert figures["below_ground"] == pytest.approx(100 * 2 / 6)
    farthest = np.linalg.norm(new[:, None] - source[None], axis=2).min(axis=1).max()
    assert figures["farthest_new"] == pytest.approx(farthest)
    # Without a source all points count.
    figures = measure_survey(prediction, reference, whole(10, 10))
    assert figures["below_ground"] == pytest.approx(100 * 2 / 106)
    # Of the source itself, all points, none of them new.
    figures = measure_survey(source, reference, whole(10, 10), source=source)
    assert figures["below_ground"] == figures["beyond_0.5"] == 0
    assert "farthest_new" not in figures


def test_the_farthest_new_point_is_found_beyond_the_extent():
    reference = source = lattice(10, 10)
    prediction = np.concatenate([source, [[500.0, 5, 0]]])
    figures = measure_survey(prediction, reference, whole(10, 10), source=source)
    assert figures["farthest_new"] == pytest.approx(np.hypot(490.5, 0.5))
    assert figures["num_points"] == 100


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=10)
def test_far_points_off_the_extent_are_those_far_from_both_surveys(seed):
    rng = np.random.default_rng(seed)
    source, new = rng.uniform(0, 12, (60, 3)), rng.uniform(0, 12, (50, 3))
    reference = rng.uniform(0, [6, 12, 12], (80, 3))
    figures = measure_survey(np.concatenate([source, new]), reference, whole(6, 12), source=source)
    to_reference, to_source = (
        np.linalg.norm(new[:, None] - cloud[None], axis=2).min(axis=1)
        for cloud in (reference, source)
    )
    is_off = new[:, 0] >= 6
    is_far = (to_reference > 1) & (~is_off | (to_source > 1))
    assert figures["beyond_1_anywhere"] == pytest.approx(100 * is_far.mean())
    assert figures["beyond_1"] == pytest.approx(100 * (to_reference[~is_off] > 1).mean())


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=5)
def test_figures_of_shifted_grids_are_means_of_those_of_brute_force(seed):
    rng = np.random.default_rng(seed)
    ground = lattice(8, 6, step=0.5)
    ground[:, 2] = 0.3 * ground[:, 0]
    clouds = []
    for share in (0.3, 0.1):
        trees = rng.uniform([0, 0, 1], [8, 6, 9], (150, 3)) + np.array([0, 0, 3])
        clouds.append(np.concatenate([ground[rng.random(len(ground)) < share], trees]))
    reference, prediction = clouds
    reference = np.concatenate([reference, ground[[0, 11, -12, -1]]])
    extent = whole(8, 6)
    surface = find_ground(reference, extent)
    figures = SurveyReference(reference, extent, surface).measure(prediction)
    of_grids: dict[str, list[float]] = {"rise": [], "rmse": [], "ground": [], "missed": []}
    for i in range(9):
        shift = np.array([i // 3, i % 3]) / 3
        cells: dict[float, dict[tuple[int, ...], list[list[np.ndarray]]]] = {1.0: {}, 2.0: {}}
        for side, of_side in cells.items():
            for number, cloud in enumerate((prediction, reference)):
                for point in cloud:
                    key = tuple(np.floor(point[:2] / side + shift).astype(int).tolist())
                    of_side.setdefault(key, [[], []])[number].append(point)
        rises = [
            np.max(ours, axis=0)[2] - np.max(theirs, axis=0)[2]
            for ours, theirs in cells[1.0].values()
            if ours and theirs
        ]
        errors, missed = [], []
        for ours, theirs in cells[2.0].values():
            above = [surface.above(np.array(c)) if c else np.empty(0) for c in (ours, theirs)]
            if not (np.abs(above[1]) <= 0.3).any():
                continue
            missed.append(not (np.abs(above[0]) <= 0.3).any())
            if ours:
                errors.append(above[0].min() - above[1].min())
        of_grids["rise"].append(float(np.mean(rises)))
        of_grids["rmse"].append(float(np.sqrt(np.mean(np.square(rises)))))
        of_grids["ground"].append(float(np.sqrt(np.mean(np.square(errors)))))
        of_grids["missed"].append(100 * float(np.mean(missed)))
    names = "canopy_bias_shifted", "canopy_rmse_shifted", "ground_rmse_2m", "ground_missed_2m"
    for name, values in zip(names, of_grids.values(), strict=True):
        assert figures[name] == pytest.approx(np.mean(values)), name
    assert 0 < figures["ground_missed_2m"] < 100


def test_a_floor_that_a_window_of_7_m_finds_is_missed_in_cells_of_2_m():
    ground, canopy = lattice(12, 12), lattice(12, 12, z=15)
    reference = np.concatenate([ground, canopy])
    prediction = np.concatenate([ground[::7], canopy])
    figures = measure_survey(prediction, reference, whole(12, 12))
    assert figures["ground_rmse"] == 0
    assert figures["ground_missed_2m"] > 30 and figures["ground_rmse_2m"] > 8


def test_gaps_are_cells_without_points_high_above_ground():
    ground, tall = lattice(10, 10), lattice(10, 10, z=5)
    # Of a hundred cells the reference has trees in 60, the prediction in 70.
    reference = np.concatenate([ground, tall[:60]])
    prediction = np.concatenate([ground, tall[:70]])
    figures = measure_survey(prediction, reference, whole(10, 10))
    assert figures["gap_fraction_error"] == pytest.approx(10)
    extent = whole(10, 10)
    own = SurveyReference(reference, extent, find_ground(reference, extent)).figures()
    assert own["gap_fraction"] == pytest.approx(40)


def test_bands_are_those_of_height_above_ground():
    rng = np.random.default_rng(0)
    ground, crowns = lattice(12, 12, step=0.5), lattice(12, 12, z=10, step=0.5)
    reference = np.concatenate([ground, crowns])
    reference[:, 2] += 0.1 * reference[:, 0]
    prediction = reference + np.array([0, 0, 1]) * rng.choice([0.1, -0.1], (len(reference), 1))
    prediction[576:, 2] += 0.2
    extent = whole(12, 12)
    against = SurveyReference(reference, extent, find_ground(reference, extent))
    figures = against.measure(prediction)
    expected = {f"{way}_reference_{band}" for way in ("to", "from") for band in ("0_2", "8_16")}
    assert figures.keys() & band_metrics().keys() == expected
    assert figures["to_reference_0_2"] == pytest.approx(0.1)
    distance = np.linalg.norm(prediction[576:, None] - reference[None, 576:], axis=2)
    assert figures["to_reference_8_16"] == pytest.approx(distance.min(axis=1).mean())
    assert figures["from_reference_8_16"] == pytest.approx(distance.min(axis=0).mean())


@pytest.mark.parametrize("everywhere", [False, True])
def test_chamfer_alone_is_that_of_all_figures_and_counts_points_beyond_or_not(everywhere):
    reference = lattice(12, 12, step=0.5)
    beyond = lattice(12, 12, step=2.0) + np.array([100.0, 0.0, 0.0])
    extent = whole(12, 12)
    ground = find_ground(reference, extent)
    against = SurveyReference(reference, extent, ground, everywhere=everywhere)
    prediction = np.concatenate([reference + np.array([0.0, 0.0, 0.1]), beyond])
    alone = against.chamfer(prediction)
    assert alone == pytest.approx(against.measure(prediction)["chamfer"])
    assert (alone > 1) == everywhere and (everywhere or alone == pytest.approx(0.2))


def test_a_survey_in_feet_has_the_figures_of_the_same_in_metres():
    rng = np.random.default_rng(3)
    source, reference, prediction = (rng.uniform(0, [9, 9, 4], (n, 3)) for n in (90, 400, 300))
    foot = unit_of(0.3048)
    assert foot.name == "ft"
    extent = whole_extent(reference, 1.0)
    in_feet = Extent(extent.cell / 0.3048, extent.origin / 0.3048, extent.covered)
    figures = measure_survey(prediction, reference, extent, source=source)
    feet = [cloud / 0.3048 for cloud in (prediction, reference)]
    scale = Scale(foot, 1.0)
    ground = find_ground(feet[1], in_feet, unit=foot)
    against = SurveyReference(feet[1], in_feet, ground, source / 0.3048, scale)
    converted = against.measure(feet[0])
    assert converted.keys() == figures.keys()
    for name, metric in lidar_metrics(scale).items():
        if metric.unit == "points/ft2":
            assert converted[name] == pytest.approx(figures[name] * 0.3048**2)
        else:
            factor = 0.3048 if metric.unit == "ft" else 1.0
            assert converted[name] * factor == pytest.approx(figures[name], rel=1e-6)
    assert lidar_metrics(scale)["f_score_0.5"].title == "F-score at 0.5 m (1.64 ft)"


def test_a_prediction_without_points_on_the_common_extent_is_refused():
    with pytest.raises(DataError, match="prediction has no points on the common extent"):
        measure_survey(lattice(2, 2) + 50, lattice(2, 2), whole(2, 2))
