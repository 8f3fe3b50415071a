"""The training loss: scale-free, one value per cloud, finite for degenerate clouds."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Batch

from pointup.errors import ConfigError
from pointup.geometry.local_geometry import mean_gaps
from pointup.geometry.neighbors import knn
from pointup.geometry.packed import ptr_from_sizes
from pointup.model.upsampler import Upsampler, UpsamplerOutput
from pointup.training.objective import (
    LossConfig,
    cloud_losses,
    density_loss,
    target_spacing,
    training_ratio,
)

SMALL = {"feature_dim": 8, "k": 4, "num_layers": 1, "heads": 2, "child_heads": 2}


def batch_of(*sizes: tuple[int, int]) -> Batch:
    generator = torch.Generator().manual_seed(0)
    clouds = [[torch.rand(n, 3, generator=generator) for n in pair] for pair in sizes]
    normals = [torch.nn.functional.normalize(target - 0.5, dim=1) for _, target in clouds]
    return Batch(
        pos=torch.cat([source for source, _ in clouds]),
        ptr=ptr_from_sizes(torch.tensor([n for n, _ in sizes])),
        target=torch.cat([target for _, target in clouds]),
        target_ptr=ptr_from_sizes(torch.tensor([m for _, m in sizes])),
        target_normals=torch.cat(normals),
    )


def losses(batch: Batch, config: LossConfig) -> Tensor:
    torch.manual_seed(0)
    ratio = training_ratio(batch, None, 16.0)
    output = Upsampler(**SMALL)(batch.pos, batch.ptr, ratio)
    return cloud_losses(output, batch, target_spacing(output.gaps, batch.ptr, ratio), config)


EVERY_TERM = [
    LossConfig(repulsion=0.3, coverage=0.5, output_to_plane=0.5, outliers=0.4),
    LossConfig(chamfer="squared", point_to_plane=0.0),
    LossConfig(chamfer="density-aware", density_alpha=2.0, trim=0.1, outliers=0.3),
]


@pytest.mark.parametrize("config", EVERY_TERM)
def test_the_loss_of_a_cloud_is_independent_of_scale_and_batch(config):
    batch = batch_of((20, 70), (30, 45))
    both = losses(batch, config)
    larger = batch.clone()
    larger.pos, larger.target = batch.pos * 64, batch.target * 64
    torch.testing.assert_close(losses(larger, config), both, rtol=1e-4, atol=1e-5)
    for other in (batch_of((20, 70)), batch_of((20, 70), (0, 0))):
        torch.testing.assert_close(losses(other, config)[:1], both[:1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("config", EVERY_TERM)
def test_empty_clouds_and_points_in_one_place_have_a_finite_loss(config):
    batch = batch_of((6, 12), (0, 0), (6, 12))
    batch.pos[:6] = 1.0
    values = losses(batch, config)
    assert values.shape == (3,) and values.isfinite().all() and values[1] == 0


@pytest.mark.parametrize("config", EVERY_TERM)
def test_a_cloud_without_a_target_has_a_finite_loss_and_leaves_the_others_as_they_are(config):
    batch = batch_of((20, 70), (9, 0), (30, 45))
    batch.pos.requires_grad_()
    values = losses(batch, config)
    values.sum().backward()
    assert values.isfinite().all() and batch.pos.grad.isfinite().all()
    alone = batch_of((20, 70))
    torch.testing.assert_close(losses(alone, config), values[:1].detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("config", EVERY_TERM)
def test_without_any_source_point_the_losses_are_0_and_have_a_graph(config):
    batch = batch_of((0, 12), (0, 0), (0, 30))
    batch.pos.requires_grad_()
    values = losses(batch, config)
    assert values.tolist() == [0, 0, 0]
    values.sum().backward()
    assert batch.pos.grad.shape == (0, 3)


def test_coverage_is_the_fourth_power_of_the_distance_to_the_nearest_candidate():
    batch = batch_of((25, 60))
    # Farther away than any candidate.
    batch.target[0] = 9.0
    ratio = training_ratio(batch, None, 16.0)
    output: UpsamplerOutput = Upsampler(**SMALL)(batch.pos, batch.ptr, ratio)
    spacing = torch.full((25,), 0.1)
    without = LossConfig(point_to_plane=0.0, density=0.0)
    with_it = replace(without, coverage=0.3)
    gap = torch.cdist(batch.target, output.candidates.detach()).amin(1) / 0.1
    assert 0.2 < (gap < 2).float().mean() < 1
    expected = 0.3 * gap.clamp(max=2.0).pow(4).mean()
    difference = cloud_losses(output, batch, spacing, with_it) - cloud_losses(
        output, batch, spacing, without
    )
    torch.testing.assert_close(difference, expected[None], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("chamfer", ["unsquared", "density-aware"])
def test_outliers_count_by_the_fourth_power_of_their_distance_to_the_target(chamfer):
    batch = batch_of((25, 60))
    # Farther away from the target than any output point may be.
    batch.pos[0] = 9.0
    ratio = training_ratio(batch, None, 16.0)
    output: UpsamplerOutput = Upsampler(**SMALL)(batch.pos, batch.ptr, ratio)
    spacing = torch.full((25,), 0.1)
    without = LossConfig(chamfer=chamfer, point_to_plane=0.0, density=0.0)
    off = torch.cdist(output.pos.detach(), batch.target).amin(1) / 0.1
    assert 0.2 < (off < 3).float().mean() < 1
    expected = 0.3 * off.clamp(max=3.0).pow(4).mean()
    difference = cloud_losses(
        output, batch, spacing, replace(without, outliers=0.3)
    ) - cloud_losses(output, batch, spacing, without)
    torch.testing.assert_close(difference, expected[None], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["point_to_plane", "output_to_plane"])
def test_plane_distances_are_those_of_all_candidates_or_of_the_output(name):
    batch = batch_of((25, 60))
    ratio = training_ratio(batch, None, 16.0)
    output: UpsamplerOutput = Upsampler(**SMALL)(batch.pos, batch.ptr, ratio)
    spacing = torch.full((25,), 0.1)
    without = LossConfig(point_to_plane=0.0, density=0.0)
    points = (output.candidates if name == "point_to_plane" else output.pos).detach()
    nearest = torch.cdist(points, batch.target).argmin(1)
    height = ((points - batch.target[nearest]) * batch.target_normals[nearest]).sum(1).abs()
    difference = cloud_losses(
        output, batch, spacing, replace(without, **{name: 0.3})
    ) - cloud_losses(output, batch, spacing, without)
    torch.testing.assert_close(difference, 0.3 * height.mean()[None] / 0.1, rtol=1e-3, atol=1e-4)


def test_the_unsquared_chamfer_is_the_mean_distance_both_ways_in_units_of_the_spacing():
    batch = batch_of((25, 60))
    ratio = training_ratio(batch, None, 16.0)
    output: UpsamplerOutput = Upsampler(**SMALL)(batch.pos, batch.ptr, ratio)
    spacing = torch.full((25,), 0.5)
    distances = torch.cdist(output.pos, batch.target, compute_mode="donot_use_mm_for_euclid_dist")
    expected = (distances.amin(1).mean() + distances.amin(0).mean()) / 0.5
    config = LossConfig(point_to_plane=0.0, density=0.0)
    torch.testing.assert_close(cloud_losses(output, batch, spacing, config)[0], expected)
    # Doubling the unit at half of the points halves the distances there only.
    spacing[:12] = 1.0
    scaled = cloud_losses(output, batch, spacing, config)[0]
    assert 0.5 * expected < scaled < expected


def test_the_density_loss_is_least_if_the_shares_are_those_of_the_target():
    pos = torch.tensor([[0.0, 0, 0], [1, 0, 0]])
    target = torch.tensor([[0.1, 0, 0], [0.0, 0.1, 0], [0.2, 0, 0], [0.9, 0, 0]])
    ptr = torch.tensor([0, 2])
    batch = Batch(pos=pos, ptr=ptr, target=target, target_ptr=torch.tensor([0, 4]))

    equal = torch.tensor([0.5, 0.5]).log()

    def loss(first: float) -> float:
        log_shares, found = torch.tensor([first, 1 - first]).log(), []
        for shares, quotas in ((log_shares, equal), (equal, log_shares)):
            output = UpsamplerOutput(pos, ptr, ptr, pos, ptr, shares, quotas, shares)
            found.append(float(density_loss(output, batch)))
        assert found[0] == found[1]
        return found[0]

    assert loss(0.5) == 0.0
    assert loss(0.75) == pytest.approx(-(0.75 * math.log(1.5) + 0.25 * math.log(0.5)))
    assert loss(0.75) < min(loss(0.7), loss(0.8))


def test_the_spacing_of_a_grid_shrinks_with_the_root_of_the_ratio():
    x, y = torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")
    pos = torch.stack([x, y, torch.zeros_like(x)], dim=-1).reshape(-1, 3)
    ptr = torch.tensor([0, 144])
    spacing = target_spacing(mean_gaps(*knn(pos, ptr, 5)), ptr, torch.tensor([4.0]))
    inner = ((pos[:, :2] > 0) & (pos[:, :2] < 11)).all(1)
    torch.testing.assert_close(spacing[inner], torch.full((100,), 0.5))


def test_the_ratio_of_a_pair_is_clamped_to_one_and_the_largest():
    batch = batch_of((10, 45), (10, 5), (2, 60), (0, 4))
    assert training_ratio(batch, None, 16.0).tolist() == [4.5, 1.0, 16.0, 1.0]
    assert training_ratio(batch, 2.0, 16.0).tolist() == [2.0] * 4


def test_an_impossible_weight_is_refused():
    with pytest.raises(ConfigError, match="repulsion"):
        replace(LossConfig(), repulsion=-1.0)

    with pytest.raises(ConfigError, match=r"--loss\.point-to-plane is nan"):
        LossConfig(point_to_plane=(1.0, math.nan))
    wrong: Any = "sqared"
    with pytest.raises(
        ConfigError, match=r"--loss\.chamfer is 'sqared'; give one of .'unsquared', "
    ):
        LossConfig(chamfer=wrong)


TERMS = [
    *("point_to_plane", "output_to_plane", "coverage", "outliers", "density", "error", "repulsion"),
]


@pytest.mark.parametrize("term", TERMS)
def test_a_weight_with_two_numbers_changes_linearly_during_the_run(term):
    batch = batch_of((20, 70), (30, 45))
    torch.manual_seed(0)
    ratio = training_ratio(batch, None, 16.0)
    output: UpsamplerOutput = Upsampler(**SMALL, predict_error=True)(batch.pos, batch.ptr, ratio)
    spacing = target_spacing(output.gaps, batch.ptr, ratio)
    for share_done, weight in ((0.0, 3.0), (0.25, 2.25), (1.0, 0.0)):
        changing = replace(LossConfig(), **{term: (3.0, 0.0)})
        actual = cloud_losses(output, batch, spacing, changing, share_done)
        constant = replace(LossConfig(), **{term: weight})
        expected = cloud_losses(output, batch, spacing, constant)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    without = cloud_losses(output, batch, spacing, replace(LossConfig(), **{term: 0.0}))
    at_start = cloud_losses(output, batch, spacing, changing)
    assert (at_start - without).abs().min() > 1e-4, "the term has to matter"


def test_the_error_term_is_least_where_the_predicted_errors_are_the_distances():
    batch = batch_of((25, 60))
    ratio = training_ratio(batch, None, 16.0)
    output: UpsamplerOutput = Upsampler(**SMALL, predict_error=True)(batch.pos, batch.ptr, ratio)
    spacing = torch.full((25,), 0.5)
    true = (torch.cdist(output.pos, batch.target).amin(1) / 0.5).log()

    def term(log_error: torch.Tensor) -> float:
        given = output._replace(log_error=log_error)
        without = LossConfig(point_to_plane=0.0, density=0.0, error=0.0)
        losses = [
            cloud_losses(given, batch, spacing, config)[0]
            for config in (replace(without, error=0.3), without)
        ]
        return float((losses[0] - losses[1]).detach())

    assert term(true) == pytest.approx(0.3 * float(true.mean() + 1), abs=1e-4)
    assert term(true) < min(term(true + 0.1), term(true - 0.1), term(true.mean().expand(60)))


def test_the_distances_of_the_output_are_those_of_the_candidates_that_it_is():
    batch = batch_of((25, 60), (30, 70))
    output: UpsamplerOutput = Upsampler(**SMALL)(batch.pos, batch.ptr, 2.4)
    spacing = torch.full((55,), 0.5)
    losses = [
        cloud_losses(given, batch, spacing, LossConfig(point_to_plane=0.5))
        for given in (output, output._replace(picked=None))
    ]
    torch.testing.assert_close(*losses, rtol=0, atol=0)


def test_with_the_unit_of_the_cloud_a_centimetre_counts_the_same_everywhere():
    batch = batch_of((25, 60))
    output: UpsamplerOutput = Upsampler(**SMALL)(batch.pos, batch.ptr, 60 / 25)
    spacing = torch.linspace(0.1, 0.9, 25)
    distances = torch.cdist(output.pos, batch.target, compute_mode="donot_use_mm_for_euclid_dist")
    expected = (distances.amin(1).mean() + distances.amin(0).mean()) / 0.5
    config = LossConfig(point_to_plane=0.0, density=0.0, unit="cloud")
    torch.testing.assert_close(cloud_losses(output, batch, spacing, config)[0], expected)
