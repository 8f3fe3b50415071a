"""Options of the model for forests: columns, extrapolated candidates, predicted errors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_model import SMALL, as_if_trained, packed, surface_points

from pointup.model.upsampler import Upsampler

FOREST = {
    "column_layers": 1,
    "column_neighbors": 4,
    "column_stride": 3,
    "extrapolation": True,
    "predict_error": True,
}


def test_a_model_with_columns_knows_what_is_far_above_a_point() -> None:
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


def test_extrapolated_candidates_lie_beyond_their_parents() -> None:
    pos = surface_points(200)
    model = Upsampler(**SMALL | {"extrapolation": True, "k": 12})
    with torch.no_grad():
        children = model(pos, torch.tensor([0, 200]), 4.0).candidates.view(200, 8, 3)
    to_midpoint, beyond = children[:, 1::2] - pos[:, None], children[:, 2::2] - pos[:, None]
    torch.testing.assert_close(beyond, -to_midpoint[:, :3], atol=1e-6, rtol=1e-5)


def test_thinning_prefers_candidates_with_small_predicted_errors() -> None:
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


@pytest.mark.parametrize("options", [{}, FOREST])
def test_a_cloud_does_not_change_with_the_others_of_the_batch(options: dict[str, object]) -> None:
    pos, ptr = packed(120, 80, 100)
    model = as_if_trained(**options)
    with torch.no_grad():
        together = model(pos, ptr, torch.tensor([2.0, 3.0, 2.0]))
        alone = model(pos[120:200], torch.tensor([0, 80]), 3.0)
    rows = slice(*together.ptr[1:3].tolist())
    torch.testing.assert_close(together.pos[rows], alone.pos, atol=1e-5, rtol=1e-5)
    if options:
        assert together.log_error is not None and alone.log_error is not None
        torch.testing.assert_close(together.log_error[rows], alone.log_error, atol=1e-4, rtol=1e-4)


def test_a_model_with_columns_is_scaled_and_moved_with_its_input() -> None:
    pos, ptr = packed(150)
    model = as_if_trained(**FOREST)
    with torch.no_grad():
        before = model(pos, ptr, 4.0)
        after = model(pos * 4 + 8, ptr, 4.0)
    torch.testing.assert_close(before.candidates * 4 + 8, after.candidates, atol=2e-3, rtol=1e-4)
