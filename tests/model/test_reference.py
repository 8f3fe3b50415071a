"""The model against its reference implementation in plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from reference import reference_upsample

from pointup.benchmark.training_step import sheet
from pointup.model.upsampler import Upsampler


def model_that_moves(**options: object) -> Upsampler:
    """A model with random weights, so that its offsets are not zero."""
    torch.manual_seed(0)
    model = Upsampler(**options)
    for weight in model.parameters():
        if not weight.any():
            torch.nn.init.normal_(weight, std=0.1)
    return model


@pytest.mark.parametrize(
    "options",
    [{}, {"concat": False, "beta": False, "num_refinements": 2, "feature_dim": 8, "heads": 2}],
    ids=["default", "other options"],
)
@pytest.mark.parametrize("num_points", [5, 300])
def test_the_model_makes_the_children_of_the_reference_with_the_same_gradients(options, num_points):
    model = model_that_moves(**options)
    pos = sheet(num_points, 0, 0.01)
    ours = model(pos, torch.tensor([0, num_points]), 4.0)
    kept, children = reference_upsample(model, pos, 4.0)
    torch.testing.assert_close(children, ours.candidates, rtol=1e-5, atol=1e-5)
    assert len(kept) == len(ours.pos) == 4 * num_points
    away = torch.randn(children.shape, generator=torch.Generator().manual_seed(0))
    gradients = []
    for made in (ours.candidates, children):
        model.zero_grad()
        (made * away).sum().backward()
        # Weights that choose which children are kept have no part in where they lie.
        moved = [weight.grad for weight in model.parameters() if weight.grad is not None]
        gradients.append(torch.cat([grad.flatten() for grad in moved]))
    scale = gradients[1].abs().max()
    torch.testing.assert_close(gradients[0] / scale, gradients[1] / scale, rtol=1e-3, atol=1e-4)
