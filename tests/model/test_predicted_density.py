"""Predicted densities: quotas of the output per input point."""

from __future__ import annotations

import torch
from test_model import as_if_trained, packed

from pointup.geometry.midpoints import same_number_of_slots
from pointup.model.upsampler import Upsampler


def test_dense_places_stay_dense_where_the_model_predicts_it() -> None:
    torch.manual_seed(0)
    left, right = torch.rand(600, 3) * torch.tensor([1, 1, 0]), torch.rand(150, 3)
    pos = torch.cat([left, right * torch.tensor([1, 1, 0]) + torch.tensor([1, 0, 0])])
    ptr, model = torch.tensor([0, 750]), Upsampler(slots_per_ratio=6)
    num_left = []
    for power in (0.0, 1.0):
        torch.nn.init.constant_(model.density.bias, power)
        with torch.no_grad():
            output = model(pos, ptr, 4.0)
        num_left.append(int((output.pos[:, 0] < 1).sum()))
        assert len(output.pos) == 3000
        torch.testing.assert_close(output.log_shares.exp().sum(), torch.tensor(1.0))
        # Thinning follows the prediction.
        assert abs(float(output.log_shares[:600].exp().sum()) - num_left[-1] / 3000) < 0.15
    assert num_left[0] < 2000 and num_left[1] > 2250


def test_quotas_of_a_cloud_sum_to_one_and_train_their_own_weights_only() -> None:
    model = as_if_trained()
    pos, ptr = packed(40, 3)
    quotas = model(pos, ptr, 4.0).log_quotas
    for cloud in quotas.split([40, 3]):
        torch.testing.assert_close(cloud.exp().sum(), torch.tensor(1.0))
    (quotas[:7]).sum().backward()
    learns = {
        name
        for name, weights in model.named_parameters()
        if weights.grad is not None and weights.grad.any()
    }
    assert learns == {name for name, _ in model.named_parameters() if name.startswith("quota")}


def test_quotas_depend_on_gaps_and_not_on_the_unit_of_length() -> None:
    pos = torch.rand(300, 3) * torch.tensor([1, 1, 0])
    ptr, model = torch.tensor([0, 300]), Upsampler()
    with torch.no_grad():
        torch.nn.init.constant_(model.quota_powers, 1.0)
        quotas, scaled = (model(scale * pos, ptr, 2.0).log_quotas for scale in (1.0, 100.0))
    torch.testing.assert_close(quotas, scaled, rtol=0, atol=1e-4)
    distance = (torch.cdist(pos, pos) + 9 * torch.eye(300)).sort(1).values
    near = torch.minimum(distance[:, :12], 2 * distance[:, 5:6])
    expected = near.mean(1) * distance[:, :4].mean(1)
    torch.testing.assert_close(quotas.exp(), expected / expected.sum(), rtol=1e-3, atol=0)


def test_runs_of_equal_slots_cover_the_points_in_order() -> None:
    ptr = torch.tensor([0, 4, 4, 9, 12])
    assert same_number_of_slots(torch.tensor([8, 8, 3, 8]), ptr) == [
        (8, slice(0, 4)),
        (3, slice(4, 9)),
        (8, slice(9, 12)),
    ]
