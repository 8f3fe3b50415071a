"""Options of the model for forests: columns, extrapolated candidates, predicted errors."""

from dataclasses import replace

import pytest
import torch
from forest_options import FOREST
from test_model import SMALL, as_if_trained, packed, surface_points

from pointup.errors import ModelError
from pointup.geometry.local_geometry import local_geometry
from pointup.geometry.midpoints import depths_of_slots
from pointup.geometry.neighbors import knn
from pointup.model.upsampler import Upsampler


def test_a_model_with_columns_knows_what_is_far_above_a_point():
    """A canopy far beyond the neighbours changes the points below it."""
    ground = surface_points(200)
    above = ground + torch.tensor([0.0, 0.0, 50.0])
    ptr = torch.tensor([0, 400])
    for options, changes in (({}, False), (FOREST, True)):
        model = as_if_trained(**options)
        if options:
            torch.nn.init.normal_(model.profile[-1].weight, std=0.5)
        with torch.no_grad():
            higher = model(torch.cat([ground, above + torch.tensor([0.0, 0.0, 50.0])]), ptr, 4.0)
            lower = model(torch.cat([ground, above]), ptr, 4.0)
        same = torch.allclose(lower.candidates[:1600], higher.candidates[:1600], atol=1e-5)
        assert same is not changes


def test_extrapolated_candidates_lie_beyond_their_parents():
    pos = surface_points(200)
    model = Upsampler(**SMALL | {"extrapolation": True, "k": 12})
    with torch.no_grad():
        children = model(pos, torch.tensor([0, 200]), 4.0).candidates.view(200, 8, 3)
    to_midpoint, beyond = children[:, 1::2] - pos[:, None], children[:, 2::2] - pos[:, None]
    torch.testing.assert_close(beyond, -to_midpoint[:, :3], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("reach", [1.5, 8.0])
def test_descending_candidates_lie_below_their_parents_and_above_the_ground(reach):
    ground = surface_points(200)
    pos, ptr = torch.cat([ground, ground + torch.tensor([0.003, 0.0, 0.5])]), torch.tensor([0, 400])
    options = SMALL | {"column_layers": 1, "k": 12, "extrapolation": True, "reach": reach}
    with torch.no_grad():
        without = Upsampler(**options)(pos, ptr, 9.0).candidates.view(400, 18, 3)
        children = Upsampler(**options, descent=True)(pos, ptr, 9.0).candidates.view(400, 18, 3)
    descends = torch.arange(18) % 8 == 7
    torch.testing.assert_close(children[:, ~descends], without[:, ~descends])
    below = pos[:, None] - children[:, descends]
    assert below[..., :2].abs().max() < 1e-6
    local_spacing = local_geometry(pos, ptr, *knn(pos, ptr, 13)).local_spacing
    assert (below[..., 2] <= reach * local_spacing + 1e-6).all()
    # Of the 93 nearest in the plane, itself among them.
    nearest = torch.cdist(pos[:, :2].double(), pos[:, :2].double()).argsort(1)[:, :93]
    lowest = pos[:, 2][nearest].amin(1, keepdim=True)
    assert (children[:, descends, 2] >= lowest - 1e-6).all()
    assert (below[200:, :, 2] > 0.01).all()
    assert below[200:, 0, 2].mean() != pytest.approx(float(below[200:, 1, 2].mean()), rel=0.2)


def test_descent_needs_columns():
    with pytest.raises(ModelError, match=r"descent needs columns: set model\.column_layers"):
        Upsampler(**SMALL, descent=True)


def test_depths_are_spread_evenly_however_many_slots_there_are():
    assert not depths_of_slots(7).any()
    for num_slots in (8, 16, 40, 128):
        depths = depths_of_slots(num_slots)
        found = depths[7::8].sort().values
        assert len(found) == num_slots // 8 and (depths > 0).sum() == len(found)
        edges = torch.cat([torch.zeros(1), found, torch.ones(1)])
        assert edges.diff().max() < 2.7 / (len(found) + 1)


def test_thinning_prefers_candidates_with_small_predicted_errors():
    pos, ptr = packed(300)
    model = as_if_trained(predict_error=True)
    torch.nn.init.normal_(model.error.weight, std=1.0)
    means = []
    for exponent in (0.0, 1.0):
        model.config = replace(model.config, error_exponent=exponent)
        with torch.no_grad():
            log_error = model(pos, ptr, 2.0).log_error
        assert log_error is not None and log_error.shape == (600,) and log_error.std() > 0.1
        means.append(float(log_error.mean()))
    assert means[1] < means[0] - 0.05


def test_a_cloud_does_not_change_with_the_others_of_the_batch():
    pos, ptr = packed(120, 80, 100)
    model = as_if_trained(**FOREST)
    with torch.no_grad():
        together = model(pos, ptr, torch.tensor([2.0, 3.0, 2.0]))
        alone = model(pos[120:200], torch.tensor([0, 80]), 3.0)
    of_cloud = slice(*together.candidates_ptr[1:3].tolist())
    torch.testing.assert_close(
        together.candidates[of_cloud], alone.candidates, atol=1e-5, rtol=1e-5
    )
    # The same points; rounding in the last digit decides the order of those with equal scores.
    rows = slice(*together.ptr[1:3].tolist())
    match = torch.cdist(alone.pos.double(), together.pos[rows].double()).argmin(1)
    assert torch.equal(match.sort().values, torch.arange(len(alone.pos)))
    torch.testing.assert_close(together.pos[rows][match], alone.pos, atol=1e-5, rtol=1e-5)
    assert together.log_error is not None and alone.log_error is not None
    torch.testing.assert_close(
        together.log_error[rows][match], alone.log_error, atol=1e-4, rtol=1e-4
    )


def test_a_model_with_columns_is_scaled_and_moved_with_its_input():
    pos, ptr = packed(150)
    model = as_if_trained(**FOREST)
    with torch.no_grad():
        before = model(pos, ptr, 4.0)
        after = model(pos * 4 + 8, ptr, 4.0)
    torch.testing.assert_close(before.candidates * 4 + 8, after.candidates, atol=2e-3, rtol=1e-4)
