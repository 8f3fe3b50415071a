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
def test_neighbours_near_and_a_thousand_times_farther_away_have_finite_gradients(options):
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
        # On both sides, farther and farther: products of their positions exceed 65,504.
        distance = 1.8 ** np.maximum(np.arange(20) - 4, 0)
        side = np.array([1.0, 0.3, 0.01]) * np.where(np.arange(20) % 2, 1, -1)[:, None]
        side += 0.05 * rng.normal(size=side.shape)
        apart = 1.5 * side * (distance / distance[-1])[:, None]
        source = np.concatenate([source, apart + np.array([13.0, 5.0, 0.0])])
        pos, points = (torch.tensor(cloud, dtype=torch.float32) for cloud in (source, target))
        batch = collate([Data(pos=pos, target=points, name="a", index=0)])
        model.zero_grad()
        loss = losses_of_model(InFloat16(model), batch, None, 16.0, LossConfig())
        loss.sum().backward()
        assert loss.isfinite().all()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        assert gradients and all(gradient.isfinite().all() for gradient in gradients)
