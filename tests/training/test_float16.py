"""Mixed precision with float16, whose largest number is 65,504."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch_geometric.data import Data

from pointup.datasets.batch import collate
from pointup.model.upsampler import Upsampler
from pointup.training.objective import LossConfig, losses_of_model

FOREST = {
    "column_layers": 1,
    "extrapolation": True,
    "descent": True,
    "predict_error": True,
    "reach": 8.0,
    "num_refinements": 2,
}


class InFloat16(nn.Module):
    def __init__(self, model: Upsampler) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.float16):
            return self.model(*inputs)


@pytest.mark.parametrize(
    "options", [pytest.param({}, marks=pytest.mark.slow), FOREST], ids=["default", "forest"]
)
def test_two_points_close_to_each_other_and_far_from_the_rest_have_finite_gradients(options):
    torch.manual_seed(0)
    model = Upsampler(**options).train()
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.05 * torch.randn_like(weight)
    for seed in range(3):
        rng = np.random.default_rng(seed)
        source, target = (
            np.column_stack([10 * rng.random((n, 2)), 0.02 * rng.normal(size=n)])
            for n in (400, 1600)
        )
        apart = np.array([[11.7, 5.0, 0.0], [11.702, 5.0, 0.0]])
        source = np.concatenate([source, apart])
        pos, points = (torch.tensor(cloud, dtype=torch.float32) for cloud in (source, target))
        batch = collate([Data(pos=pos, target=points, name="a", index=0)])
        model.zero_grad()
        loss = losses_of_model(InFloat16(model), batch, None, 16.0, LossConfig())
        loss.sum().backward()
        assert loss.isfinite().all()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        assert gradients and all(gradient.isfinite().all() for gradient in gradients)
