from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import cdist, directed_hausdorff
from torch import Tensor

from pointup.geometry.surfaces import Surface
from pointup.metrics import (
    cloud_metrics,
    f_score,
    hausdorff_distance,
    normalised_per_cloud,
    point_to_surface_distance,
    protocol_metrics,
    spacing_cv,
)

# No deadline: the time depends on the load of the machine.
quick = settings(deadline=None, max_examples=30)
Sets = tuple[Tensor, Tensor, Tensor, Tensor]


@st.composite
def two_packed_sets(draw: st.DrawFn) -> Sets:
    """Two or more clouds, none empty, at different places and of different scales."""
    sizes = draw(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=2))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    places = rng.normal(size=(len(sizes), 3)) * 5
    scales = rng.uniform(0.5, 2, size=len(sizes))
    sets: list[Tensor] = []
    for side in range(2):
        counts = [pair[side] for pair in sizes]
        pos = rng.normal(size=(sum(counts), 3)) * np.repeat(scales, counts)[:, None]
        pos += np.repeat(places, counts, axis=0)
        ptr = torch.tensor(np.cumsum([0, *counts]))
        sets += [torch.tensor(pos, dtype=torch.float32), ptr]
    return sets[0], sets[1], sets[2], sets[3]


def cloud_pairs(sets: Sets) -> list[tuple[np.ndarray, np.ndarray]]:
    pos, ptr, target, target_ptr = sets
    return [
        (a.double().numpy(), b.double().numpy())
        for a, b in zip(
            pos.split(ptr.diff().tolist()), target.split(target_ptr.diff().tolist()), strict=True
        )
    ]


def pu_gcn_protocol(pred: np.ndarray, gt: np.ndarray) -> tuple[float, float]:
    """CD and HD of the PU-GCN protocol, implemented a second time."""

    def normalize(cloud: np.ndarray) -> np.ndarray:
        cloud = cloud - cloud.mean(0)
        furthest = np.sqrt((cloud**2).sum(1)).max()
        return cloud / furthest if furthest > 0 else cloud

    squared = cdist(normalize(pred), normalize(gt)) ** 2
    forward, backward = squared.min(1), squared.min(0)
    return forward.mean() + backward.mean(), forward.max() + backward.max()


@quick
@given(two_packed_sets())
def test_protocol_metrics_equal_the_pu_gcn_protocol(sets):
    values = protocol_metrics(*sets)
    expected = np.array([pu_gcn_protocol(*pair) for pair in cloud_pairs(sets)])
    for column, name in enumerate(
        ["chamfer_per_cloud_normalised_squared", "hausdorff_per_cloud_normalised_squared"]
    ):
        np.testing.assert_allclose(values[name].numpy(), expected[:, column], rtol=1e-4, atol=1e-6)


@quick
@given(two_packed_sets())
def test_cloud_metrics_equal_brute_force(sets):
    values = cloud_metrics(*sets)
    for cloud, (pred, gt) in enumerate(cloud_pairs(sets)):
        d = cdist(pred, gt)
        forward, backward = d.min(1), d.min(0)
        scale = np.linalg.norm(gt - gt.mean(0), axis=1).max() or 1.0
        expected = {
            "prediction_to_target_mean": forward.mean(),
            "target_to_prediction_mean": backward.mean(),
            "chamfer": forward.mean() + backward.mean(),
            "hausdorff": max(directed_hausdorff(pred, gt)[0], directed_hausdorff(gt, pred)[0]),
            "chamfer_squared": (forward**2).mean() + (backward**2).mean(),
            "chamfer_target_normalised_squared": ((forward / scale) ** 2).mean()
            + ((backward / scale) ** 2).mean(),
            "chamfer_per_cloud_normalised_squared": pu_gcn_protocol(pred, gt)[0],
            "hausdorff_per_cloud_normalised_squared": pu_gcn_protocol(pred, gt)[1],
            "spacing_cv": brute_force_spacing_cv(pred),
        }
        assert set(values) == set(expected)
        for name, value in expected.items():
            assert float(values[name][cloud]) == pytest.approx(value, rel=1e-3, abs=1e-5), name


def brute_force_spacing_cv(points: np.ndarray) -> float:
    if len(points) < 2:
        return 0.0
    gaps = (cdist(points, points) + np.diag([np.inf] * len(points))).min(1)
    return gaps.std() / gaps.mean()


@quick
@given(two_packed_sets(), st.floats(0.1, 3))
def test_f_score_is_the_harmonic_mean_of_precision_and_recall(sets, threshold):
    expected = []
    for pred, gt in cloud_pairs(sets):
        d = cdist(pred, gt)
        precision, recall = (d.min(1) <= threshold).mean(), (d.min(0) <= threshold).mean()
        both = precision + recall
        expected.append(2 * precision * recall / both if both else 0.0)
    np.testing.assert_allclose(f_score(*sets, threshold).numpy(), expected, atol=1e-6)
    thresholds = torch.full((len(expected),), threshold)
    assert torch.equal(f_score(*sets, thresholds), f_score(*sets, threshold))


def test_a_point_exactly_at_the_threshold_counts_in_the_f_score():
    ptr = torch.tensor([0, 1])
    pos, target = torch.zeros(1, 3), torch.tensor([[0.5, 0.0, 0.0]])
    assert f_score(pos, ptr, target, ptr, 0.5).item() == 1.0
    assert f_score(pos, ptr, target, ptr, 0.4999).item() == 0.0


@quick
@given(two_packed_sets())
def test_a_batch_has_the_metrics_of_its_clouds_one_by_one(sets):
    together = cloud_metrics(*sets)
    for cloud, (pred, gt) in enumerate(cloud_pairs(sets)):
        alone = cloud_metrics(
            torch.tensor(pred).float(),
            torch.tensor([0, len(pred)]),
            torch.tensor(gt).float(),
            torch.tensor([0, len(gt)]),
        )
        assert {name: float(value[cloud]) for name, value in together.items()} == {
            name: float(value) for name, value in alone.items()
        }


@quick
@given(two_packed_sets())
def test_hausdorff_distance_is_symmetric_and_zero_for_a_reordered_cloud(sets):
    pos, ptr, target, target_ptr = sets
    value = hausdorff_distance(*sets)
    assert torch.equal(value, hausdorff_distance(target, target_ptr, pos, ptr))
    torch.testing.assert_close(value, cloud_metrics(*sets)["hausdorff"])
    order = torch.cat([a + torch.randperm(int(b - a)) for a, b in pairwise(ptr)])
    assert not hausdorff_distance(pos, ptr, pos[order], ptr).any()


def test_moving_and_scaling_both_clouds_does_not_change_normalised_metrics():
    generator = torch.Generator().manual_seed(0)
    pos, target = (torch.randn(n, 3, generator=generator).double() for n in (60, 90))
    ptr, target_ptr = torch.tensor([0, 25, 60]), torch.tensor([0, 40, 90])
    here = cloud_metrics(pos, ptr, target, target_ptr)
    there = cloud_metrics(3 * pos + 1e5, ptr, 3 * target + 1e5, target_ptr)
    for name, value in here.items():
        factor = 1 if "normalised" in name or name == "spacing_cv" else 9 if "sq" in name else 3
        torch.testing.assert_close(there[name], factor * value, rtol=1e-6, atol=0)


def test_spacing_cv_is_zero_for_grids_and_pairs_and_higher_for_random_points():
    rng = np.random.default_rng(0)
    grid = np.stack(np.meshgrid(np.arange(40.0), np.arange(40.0), [0.0]), axis=-1).reshape(-1, 3)
    random = np.pad(rng.random((4000, 2)), ((0, 0), (0, 1)))
    clumps = random.copy()
    clumps[::2] = clumps[1::2] + 1e-5
    pos = torch.tensor(np.concatenate([grid, random, clumps, np.zeros((5, 3))])).float()
    ptr = torch.tensor([0, 1600, 5600, 9600, 9605, 9605])
    even, chance, clumped, equal, empty = spacing_cv(pos, ptr).tolist()
    assert even == pytest.approx(0, abs=1e-6) and equal == empty == 0
    assert chance == pytest.approx(np.sqrt((4 - np.pi) / np.pi), abs=0.02)
    # All nearest-neighbour distances are equal: the CV does not respond to pairs.
    assert clumped < 1e-2


@pytest.mark.parametrize("sizes", [(0, 0), (0, 5), (5, 0), (1, 1)])
def test_empty_clouds_and_single_points_have_finite_metrics(sizes):
    pos, target = torch.ones(sizes[0], 3), torch.ones(sizes[1], 3)
    sets = pos, torch.tensor([0, sizes[0]]), target, torch.tensor([0, sizes[1]])
    for name, value in cloud_metrics(*sets).items():
        assert value.tolist() == [0.0], name
    assert f_score(*sets, 0.1).tolist() == [1.0 if min(sizes) else 0.0]


def test_per_cloud_normalisation_centres_and_has_the_farthest_distance_one():
    pos = torch.rand(30, 3) * 7 + 100
    result = normalised_per_cloud(pos, torch.tensor([0, 12, 30]))
    for cloud in result.split([12, 18]):
        torch.testing.assert_close(cloud.mean(0), torch.zeros(3), atol=1e-5, rtol=0)
        torch.testing.assert_close(cloud.norm(dim=1).max(), torch.tensor(1.0))


def test_point_to_surface_distance_is_the_height_above_a_square():
    corners = np.array([[0.0, 0, 0], [4, 0, 0], [4, 4, 0], [0, 4, 0]])
    square = Surface.from_triangles(corners, np.array([[0, 1, 2], [0, 2, 3]]))
    points = torch.tensor([[1.0, 1, 0.25], [2, 3, -1], [7, 4, 4]], requires_grad=True)
    torch.testing.assert_close(
        point_to_surface_distance(points, square), torch.tensor([0.25, 1.0, 5.0]).double()
    )
