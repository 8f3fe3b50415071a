"""The upsampler: properties for any weights, output before training, densities, dtypes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from forest_options import FOREST
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch_geometric.data import Data

from pointup import upsample
from pointup.datasets.batch import collate
from pointup.errors import ModelError
from pointup.geometry.local_geometry import LocalGeometry, local_geometry, plane_normals
from pointup.geometry.midpoints import midpoint_upsample, same_number_of_slots
from pointup.geometry.packed import ptr_from_sizes
from pointup.model.upsampler import Upsampler, in_precision, padded_slots, reference_clouds
from pointup.training.objective import LossConfig, losses_of_model

SMALL = {"feature_dim": 16, "k": 5, "num_layers": 2, "heads": 2, "child_heads": 4}


def surface_points(num_points: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    xy = torch.rand(num_points, 2, generator=generator)
    return torch.cat([xy, (3 * xy[:, :1]).sin() * 0.3], dim=1)


def as_if_trained(seed: int = 0, **options: object) -> Upsampler:
    """A model with large offsets and an uneven output."""
    torch.manual_seed(seed)
    model = Upsampler(**{**SMALL, **options}).eval()
    torch.nn.init.normal_(model.pull.weight, std=0.2)
    torch.nn.init.normal_(model.arch.weight, std=0.2)
    torch.nn.init.normal_(model.normal.weight, std=0.2)
    torch.nn.init.normal_(model.density.weight, std=0.2)
    torch.nn.init.normal_(model.quota[-1].weight, std=0.2)
    return model


def packed(*sizes: int) -> tuple[Tensor, Tensor]:
    clouds = [surface_points(size, seed) for seed, size in enumerate(sizes)]
    return torch.cat(clouds), ptr_from_sizes(torch.tensor(sizes))


@pytest.mark.parametrize("ratio", [1.0, 1.5, 4.0, 7.3])
def test_the_untrained_model_equals_the_midpoint_baseline(ratio):
    pos, ptr = packed(60, 0, 3, 100)
    # With 12 neighbours none lies beyond a gap.
    output = Upsampler(**SMALL | {"k": 12})(pos, ptr, ratio)
    expected, expected_ptr = midpoint_upsample(pos, ptr, ratio)
    assert torch.equal(output.pos, expected)
    assert torch.equal(output.ptr, expected_ptr)


@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.sampled_from([1.0, 1.5, 2.25, 4.0])),
        min_size=1,
        max_size=6,
    )
)
@settings(max_examples=10, deadline=None)
def test_clouds_with_different_ratios_are_upsampled_as_if_alone(clouds):
    sizes, ratios = zip(*clouds, strict=True)
    pos, ptr = packed(*sizes)
    model = as_if_trained()
    output = model(pos, ptr, torch.tensor(ratios, dtype=torch.float64))
    assert output.ptr.diff().tolist() == [round(size * ratio) for size, ratio in clouds]
    for cloud, (size, ratio) in enumerate(clouds):
        points, made, candidates = (
            slice(*bounds[cloud : cloud + 2].tolist())
            for bounds in (ptr, output.ptr, output.candidates_ptr)
        )
        alone = model(pos[points], torch.tensor([0, size]), ratio)
        children = output.candidates[candidates]
        expected = (
            (children, alone.candidates),
            (output.log_shares[points], alone.log_shares),
            (output.log_quotas[points], alone.log_quotas),
        )
        for ours, theirs in expected:
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
        # Rounding may change which children are kept, but not whose children they are.
        of_parent = children.reshape(max(size, 1), -1, 3)[output.parent[made] - points.start]
        assert (of_parent == output.pos[made].unsqueeze(1)).all(2).any(1).all()


def test_clouds_with_the_same_number_of_slots_are_expanded_together(monkeypatch):
    pos, ptr = packed(*[20] * 6)
    model, calls = as_if_trained(), []
    real = model.place_children
    monkeypatch.setattr(model, "place_children", lambda *a: calls.append(a[1]) or real(*a))
    model(pos, ptr, torch.tensor([4.0, 2.0, 4.0, 2.0, 3.9, 2.0]))
    assert calls == [slice(0, 60), slice(60, 120)]


def test_moving_and_scaling_the_input_moves_and_scales_the_output():
    pos, ptr = packed(80)
    model = as_if_trained()
    # Powers of two and a shift by few bits change only the exponents of float32 arithmetic.
    shift = torch.tensor([1.0, -2.0, 0.5])
    moved = model((pos + shift) * 4.0, ptr, 4.0)
    still = model(pos, ptr, 4.0)
    torch.testing.assert_close(
        moved.candidates, (still.candidates + shift) * 4.0, atol=1e-4, rtol=0
    )
    assert (still.candidates - midpoint_candidates(pos, ptr)).abs().max() > 1e-3


def midpoint_candidates(pos: Tensor, ptr: Tensor) -> Tensor:
    return Upsampler(**SMALL)(pos, ptr, 4.0).candidates


def test_the_order_of_the_points_does_not_matter():
    pos, ptr = packed(70)
    shuffled = torch.randperm(70, generator=torch.Generator().manual_seed(3))
    model = as_if_trained()
    first = model(pos, ptr, 3.0).candidates.view(70, -1, 3)
    second = model(pos[shuffled], ptr, 3.0).candidates.view(70, -1, 3)
    torch.testing.assert_close(first[shuffled], second, atol=1e-5, rtol=0)


def test_the_sign_of_normals_does_not_matter(monkeypatch):
    model = as_if_trained()
    pos, ptr = packed(40, 60)
    expected = model(pos, ptr, 3.0)

    def turned_round(covariance: Tensor) -> Tensor:
        signs = torch.randint(0, 2, (len(covariance), 1)) * 2 - 1
        return plane_normals(covariance) * signs

    monkeypatch.setattr("pointup.geometry.local_geometry.plane_normals", turned_round)
    torch.testing.assert_close(model(pos, ptr, 3.0).pos, expected.pos, rtol=1e-4, atol=1e-5)


def test_points_of_a_plane_stay_on_the_plane_for_any_weights():
    pos, ptr = packed(60)
    pos[:, 2] = 0.25 * pos[:, 0] - 0.5 * pos[:, 1]
    candidates = as_if_trained()(pos, ptr, 4.0).candidates
    assert (candidates - midpoint_candidates(pos, ptr)).abs().max() > 1e-3
    off_plane = candidates[:, 2] - 0.25 * candidates[:, 0] + 0.5 * candidates[:, 1]
    assert off_plane.abs().max() < 1e-5


def test_the_parent_of_an_output_point_is_its_input_point():
    pos, ptr = packed(50, 60)
    output = Upsampler(**SMALL)(pos, ptr, 2.0)
    # Untrained children lie halfway to a neighbour among the four nearest.
    assert ((output.pos - pos[output.parent]).norm(dim=1) < 0.5).all()
    assert (output.parent[: output.ptr[1]] < 50).all()
    assert (output.parent[output.ptr[1] :] >= 50).all()


@pytest.mark.parametrize(("cost", "padded"), [(9, [2, 3, 9]), (15, [3, 3, 9]), (500, [9, 9, 9])])
def test_clouds_are_expanded_together_where_that_costs_less(cost, padded):
    slots, sizes = torch.tensor([2, 3, 9]), torch.tensor([10, 10, 10])
    assert padded_slots(slots, sizes, cost).tolist() == padded


@pytest.mark.parametrize("ratio", [2.0, torch.tensor([2.0, 8.0, 2.0])])
def test_an_output_point_is_the_candidate_that_was_picked(ratio):
    pos, ptr = packed(50, 60, 40)
    output = as_if_trained()(pos, ptr, ratio)
    torch.testing.assert_close(output.candidates[output.picked], output.pos, rtol=0, atol=0)


def test_empty_clouds_single_points_and_duplicates_have_finite_output():
    pos = torch.cat([torch.zeros(20, 3), torch.ones(1, 3), surface_points(30)])
    ptr = torch.tensor([0, 20, 20, 21, 51])
    output = as_if_trained()(pos, ptr, 4.0)
    assert output.ptr.tolist() == [0, 80, 80, 84, 204]
    assert output.pos.isfinite().all()


@pytest.mark.parametrize(
    ("ptr", "message"),
    [
        (torch.tensor([0, 40, 30, 100]), "ptr decreases"),
        (torch.tensor([0, 50, 90]), "ptr runs from 0 to 90"),
        (torch.tensor([0, 100], dtype=torch.int32), r"torch\.int32: must be \(B \+ 1,\) int64"),
        (torch.tensor([], dtype=torch.int64), r"ptr of shape \(0,\)"),
        ([0, 100], r"ptr is a list: must be a tensor"),
    ],
)
def test_a_ptr_that_does_not_fit_the_points_is_refused(ptr, message):
    with pytest.raises(ValueError, match=message):
        as_if_trained()(torch.rand(100, 3), ptr, 2.0)


@pytest.mark.parametrize(
    ("ratio", "message"),
    [
        ("2", "upsampling ratio '2' is no number"),
        (None, "upsampling ratio None is no number"),
        (torch.tensor([2.0, 3.0, 4.0]), r"ratio of shape \(3,\) for 2 clouds"),
        (torch.tensor([[2.0], [3.0]]), r"ratio of shape \(2, 1\) for 2 clouds"),
    ],
)
def test_a_ratio_that_does_not_fit_the_clouds_is_refused(ratio, message):
    pos, ptr = packed(50, 40)
    with pytest.raises(ValueError, match=message):
        as_if_trained()(pos, ptr, ratio)


def test_numbers_of_points_do_not_depend_on_the_ratios_of_other_clouds():
    pos, ptr = packed(30, 40, 30)
    # In float32, 1.05 x 30 is below 31.5.
    assert as_if_trained()(pos, ptr, [1.05, 2.0, 1.05]).ptr.tolist() == [0, 32, 112, 144]


def test_points_that_are_no_tensor_are_refused():
    with pytest.raises(ValueError, match=r"points are ndarray: make a tensor of them \(N, 3\)"):
        as_if_trained()(np.zeros((3, 3), np.float32), torch.tensor([0, 3]), 2.0)


def test_an_empty_batch_can_be_propagated_backward():
    model = as_if_trained()
    output = model(torch.empty(0, 3), torch.tensor([0, 0, 0]), 4.0)
    output.pos.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_every_weight_has_a_gradient_and_all_are_finite():
    model = as_if_trained()
    pos, ptr = packed(40, 3)
    output = model(pos, ptr, 4.0)
    made = (output.candidates, output.log_shares, output.log_quotas)
    sum(values.square().sum() for values in made).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.any() or name.endswith("key_value.bias"), name


@pytest.mark.parametrize(
    "options",
    [
        {"concat": False},
        {"beta": False},
        {"heads": 1, "child_heads": 1},
        {"num_layers": 0},
        {"num_refinements": 1},
        {"slots_per_ratio": 3.0},
        {"dropout": 0.5},
    ],
)
def test_each_option_gives_a_model_that_works(options):
    pos, ptr = packed(30, 20)
    output = as_if_trained(**options).train()(pos, ptr, 2.5)
    assert output.ptr.tolist() == [0, 75, 125]
    output.pos.sum().backward()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"colour": 1}, "unknown model option"),
        ({"heads": 5}, "not a multiple"),
        ({"k": 0}, r"model\.k is 0; it must be at least 1"),
        ({"k": 10**9}, "k is 1000000000; it must be at most 1024"),
        ({"k": 1.5}, r"model\.k is 1\.5; it must be a whole number"),
        ({"k": True}, "model.k is True; it must be a whole number"),
        ({"heads": None}, "heads is None; it must be a whole number"),
        ({"relaxation_steps": -1}, "relaxation_steps is -1; it must be at least 0"),
        ({"dropout": [0.1]}, r"dropout is \[0.1\]; it must be a finite number"),
        ({"dropout": 1.0}, "dropout is 1.0; it must be at most 0.99"),
        ({"slots_per_ratio": math.nan}, "slots_per_ratio is nan; it must be a finite number"),
        ({"slots_per_ratio": math.inf}, "slots_per_ratio is inf; it must be a finite number"),
        ({"concat": "no"}, "concat is 'no'; it must be true or false"),
    ],
)
def test_an_impossible_option_is_refused_by_name(options, message):
    with pytest.raises((ValueError, ModelError), match=message):
        Upsampler(**options)


@torch.no_grad()
def test_features_of_points_differ_before_training():
    model, outputs = Upsampler().eval(), {}

    def keep_first(layer: torch.nn.Module, _: object, output: Tensor) -> None:
        outputs.setdefault(layer, output)

    for layer, _ in model.layers_to_calibrate():
        layer.register_forward_hook(keep_first)
    model(*reference_clouds(), 2.0)
    for layer, spread in model.layers_to_calibrate():
        values = outputs[layer].flatten(0, -2)
        assert values.mean(0).abs().max() < 1e-3
        torch.testing.assert_close(values.std(0), torch.full(values.shape[1:], spread))


def test_dense_places_stay_dense_where_the_model_predicts_it():
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


def test_quotas_of_a_cloud_sum_to_one_and_train_their_own_weights_only():
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


def test_quotas_depend_on_gaps_and_not_on_the_unit_of_length():
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


def test_runs_of_equal_slots_cover_the_points_in_order():
    ptr = torch.tensor([0, 4, 4, 9, 12])
    assert same_number_of_slots(torch.tensor([8, 8, 3, 8]), ptr) == [
        (8, slice(0, 4)),
        (3, slice(4, 9)),
        (8, slice(9, 12)),
    ]


@pytest.fixture
def float64_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("options", [{}, FOREST])
def test_models_are_made_loaded_and_applied_whatever_the_default_dtype(options, tmp_path, request):
    model, points = as_if_trained(**options), packed(60)[0].numpy()
    expected = upsample(points, 2.5, model=model)
    model.save_pretrained(tmp_path)
    request.getfixturevalue("float64_by_default")
    assert {weight.dtype for weight in Upsampler(**options).parameters()} == {torch.float32}
    assert np.array_equal(upsample(points, 2.5, model=tmp_path), expected)


@pytest.mark.usefixtures("float64_by_default")
def test_batches_are_float32_and_are_trained_on_whatever_the_default_dtype():
    pos = packed(40)[0].float()
    samples = [
        Data(pos=pos, target=pos, name=name, index=0, **more)
        for name, more in (("a", {}), ("b", {"resample": pos}))
    ]
    batch = collate(samples)
    for name in ("pos", "target", "resample"):
        assert batch[name].dtype == torch.float32
    losses_of_model(as_if_trained().train(), batch, None, 4.0, LossConfig()).sum().backward()


@pytest.mark.parametrize("options", [{}, FOREST])
def test_results_do_not_depend_on_the_default_device(options):
    model, (pos, ptr) = as_if_trained(**options), packed(40, 0, 60)
    ratios, pair = torch.tensor([2.0, 1.0, 3.0]), Data(pos=pos, target=pos, name="a", index=0)

    def results() -> list[Any]:
        batch = collate([pair, pair])
        return [
            upsample(pos.numpy(), 2.5, model=model, device="cpu"),
            upsample(pos.numpy(), 16.0, model=model, device="cpu"),
            model(pos, ptr, ratios).pos,
            midpoint_upsample(pos, ptr, 2.0)[0],
            losses_of_model(model, batch, None, 4.0, LossConfig()),
            losses_of_model(model, batch, 2.0, 4.0, LossConfig()),
        ]

    expected = results()
    # It holds no values: what is made there by mistake can't be used.
    with torch.device("meta"):
        made = results()
    for one, other in zip(made, expected, strict=True):
        np.testing.assert_array_equal(*(torch.as_tensor(each).detach() for each in (one, other)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("autocast", [True, False])
def test_points_of_another_floating_dtype_are_cast_to_float32(dtype, autocast):
    model, (pos, ptr) = as_if_trained(), packed(60)
    pos = pos.to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        made, expected = (model(points, ptr, 2.0) for points in (pos, pos.float()))
    assert made.pos.dtype == made.candidates.dtype == torch.float32
    assert torch.equal(made.pos, expected.pos)


def test_weights_in_16_bits_keep_their_values_and_begin_at_multiples_of_16_bytes():
    model = Upsampler(**SMALL | {"position_hidden": 12})
    weights = dict(in_precision(model, torch.bfloat16).named_parameters())
    del weights["quota_powers"]
    for name, weight in weights.items():
        assert torch.equal(weight, model.get_parameter(name).bfloat16()), name
        assert weight.data_ptr() % 16 == 0, name


def test_coordinates_are_described_outside_autocast(monkeypatch):
    seen = []

    def recorded(*values: Tensor) -> LocalGeometry:
        seen.append(torch.is_autocast_enabled("cpu"))
        return local_geometry(*values)

    monkeypatch.setattr("pointup.model.upsampler.local_geometry", recorded)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        as_if_trained()(*packed(60), 2.0)
    assert seen and not any(seen)


@pytest.mark.parametrize(
    "pos", [torch.zeros(9, 6), torch.zeros(9), torch.zeros(9, 3, dtype=torch.int64)]
)
def test_points_that_are_not_three_floats_each_are_refused(pos):
    with pytest.raises(
        ValueError, match=r"^points \(9,.*\) of torch\..*: must be \(N, 3\) float32"
    ):
        as_if_trained()(pos, torch.tensor([0, 9]), 2.0)
