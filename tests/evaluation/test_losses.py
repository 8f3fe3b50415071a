from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pointup.losses import (
    chamfer_distance,
    density_aware_chamfer_distance,
    directed_chamfer_distances,
    point_to_plane_distance,
    repulsion_loss,
)

# No deadline: the time depends on the load of the machine.
quick = settings(deadline=None, max_examples=30)
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Sets = tuple[Tensor, Tensor, Tensor, Tensor]


def point_to_plane(pos: Tensor, ptr: Tensor, target: Tensor, target_ptr: Tensor) -> Tensor:
    """`point_to_plane_distance` with normals that depend on the target point alone."""
    normals = torch.nn.functional.normalize(torch.cos(7 * target.detach()), dim=1)
    return point_to_plane_distance(pos, ptr, target, target_ptr, normals)


LOSSES: dict[str, Loss] = {
    "chamfer": chamfer_distance,
    "chamfer squared": partial(chamfer_distance, squared=True),
    "density-aware": partial(density_aware_chamfer_distance, alpha=2.0),
    "density-aware, trimmed": partial(density_aware_chamfer_distance, alpha=2.0, trim=0.3),
    "repulsion": lambda pos, ptr, *_: repulsion_loss(pos, ptr, k=3, radius=1.0),
    "point to plane": point_to_plane,
}
any_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


def brute_force(name: str, a: Tensor, b: Tensor) -> Tensor:
    """The loss of one pair of clouds, from the matrix of all distances."""
    # `vector_norm` has the gradient 0 at distance 0 too.
    d = torch.linalg.vector_norm(a[:, None] - b[None], dim=2)
    if name == "repulsion":
        own = torch.linalg.vector_norm(a[:, None] - a[None], dim=2)
        nearest = own.sort(1).values[:, 1:4]
        return (1 - nearest).relu().sum() / (3 * max(len(a), 1))
    if len(a) == 0 or len(b) == 0:
        return 0 * (a.sum() + b.sum())
    if name == "point to plane":
        normals = torch.nn.functional.normalize(torch.cos(7 * b.detach()), dim=1)
        i = d.argmin(1)
        return ((a - b[i]) * normals[i]).sum(1).abs().mean()
    if name == "chamfer":
        return d.amin(1).mean() + d.amin(0).mean()
    if name == "chamfer squared":
        return d.amin(1).square().mean() + d.amin(0).square().mean()
    trim = 0.3 if "trimmed" in name else 0.0
    both = []
    for matrix, share in [(d, 0.0), (d.T, trim)]:
        distance, neighbor = matrix.min(1)
        kept = distance.argsort()[: len(distance) - int(share * len(distance))]
        n = torch.bincount(neighbor[kept], minlength=matrix.shape[1])[neighbor[kept]]
        r = max(1.0, len(kept) / matrix.shape[1])
        both.append((1 - r / n * torch.exp(-2 * distance[kept])).mean())
    return (both[0] + both[1]) / 2


@st.composite
def two_packed_sets(draw: st.DrawFn) -> Sets:
    sizes = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=4))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    sets: list[Tensor] = []
    for side in range(2):
        ptr = torch.tensor(np.cumsum([0] + [pair[side] for pair in sizes]))
        sets += [torch.tensor(rng.normal(size=(int(ptr[-1]), 3))), ptr]
    return sets[0], sets[1], sets[2], sets[3]


def one_by_one(pos: Tensor, ptr: Tensor, target: Tensor, target_ptr: Tensor) -> list[Sets]:
    def bounds(size: int) -> Tensor:
        return torch.tensor([0, size])

    return [
        (a, bounds(len(a)), b, bounds(len(b)))
        for a, b in zip(
            pos.split(ptr.diff().tolist()), target.split(target_ptr.diff().tolist()), strict=True
        )
    ]


@pytest.mark.parametrize("name", LOSSES)
@quick
@given(sets=two_packed_sets())
def test_values_and_gradients_are_those_of_brute_force(name, sets):
    pos, ptr, target, _ = sets
    pos.requires_grad_(), target.requires_grad_()
    values = LOSSES[name](*sets)
    assert values.shape == (len(ptr) - 1,)
    if len(ptr) == 1:
        return
    clouds = one_by_one(*sets)
    expected = torch.stack([brute_force(name, a, b) for a, _, b, _ in clouds])
    torch.testing.assert_close(values, expected)
    weights = torch.arange(1.0, len(expected) + 1)
    for ours, theirs in zip(
        *(
            torch.autograd.grad(
                (loss * weights).sum(), (pos, target), allow_unused=True, materialize_grads=True
            )
            for loss in (values, expected)
        ),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


@any_loss
@quick
@given(sets=two_packed_sets())
def test_a_batch_has_the_losses_of_its_clouds_one_by_one(loss, sets):
    sets = (sets[0].float(), sets[1], sets[2].float(), sets[3])
    alone = [loss(*cloud) for cloud in one_by_one(*sets)] if len(sets[1]) > 1 else []
    assert torch.equal(loss(*sets), torch.cat([torch.empty(0), *alone]))


@any_loss
def test_the_order_of_the_points_does_not_matter(loss):
    pos, target = torch.randn(40, 3).double(), torch.randn(90, 3).double()
    ptr, target_ptr = torch.tensor([0, 40]), torch.tensor([0, 90])
    shuffled = pos[torch.randperm(40)], ptr, target[torch.randperm(90)], target_ptr
    torch.testing.assert_close(loss(*shuffled), loss(pos, ptr, target, target_ptr))


@any_loss
def test_gradients_are_finite_at_zero_distance(loss):
    pos = torch.randn(30, 3)
    pos = torch.cat([pos, pos[:10]]).requires_grad_()
    target, ptr = pos.detach().clone().requires_grad_(), torch.tensor([0, 0, 20, 40])
    loss(pos, ptr, target, ptr).sum().backward()
    assert pos.grad is not None and pos.grad.isfinite().all()
    assert target.grad is None or target.grad.isfinite().all()


@any_loss
@pytest.mark.parametrize("sizes", [(0, 0), (0, 5), (5, 0)])
def test_an_empty_cloud_has_no_loss_and_no_gradient(loss, sizes):
    # Far apart, so that the points do not repel each other.
    pos = (10 * torch.eye(5, 3).cumsum(0) * torch.arange(1, 6)[:, None])[: sizes[0]]
    pos.requires_grad_()
    target = torch.randn(sizes[1], 3)
    value = loss(pos, torch.tensor([0, sizes[0]]), target, torch.tensor([0, sizes[1]]))
    value.sum().backward()
    assert value.tolist() == [0.0]
    assert pos.grad is not None and not pos.grad.any()


@any_loss
def test_losses_stay_in_float32_under_autocast(loss):
    generator = torch.Generator().manual_seed(0)
    pos, target = (torch.randn(n, 3, generator=generator) for n in (50, 80))
    sets = pos, torch.tensor([0, 20, 50]), target, torch.tensor([0, 30, 80])
    expected = loss(*sets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(loss(*sets), expected)
        halved = loss(pos.bfloat16(), sets[1], target, sets[3])
    rounded = loss(pos.bfloat16().float(), sets[1], target, sets[3])
    assert halved.dtype == torch.float32 and torch.equal(halved, rounded)


@quick
@given(sets=two_packed_sets())
def test_chamfer_is_symmetric_and_the_sum_of_its_directions(sets):
    pos, ptr, target, target_ptr = sets
    for squared in (False, True):
        value = chamfer_distance(*sets, squared=squared)
        directions = directed_chamfer_distances(*sets, squared=squared)
        assert torch.equal(value, directions[0] + directions[1])
        assert torch.equal(value, chamfer_distance(target, target_ptr, pos, ptr, squared=squared))


@quick
@given(sets=two_packed_sets())
def test_density_aware_chamfer_lies_between_0_and_1_and_is_0_for_equal_clouds(sets):
    value = density_aware_chamfer_distance(*sets, alpha=3.0)
    assert ((value > -1e-6) & (value <= 1)).all()
    same = density_aware_chamfer_distance(*sets[:2], *sets[:2], alpha=3.0)
    torch.testing.assert_close(same, torch.zeros_like(same))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_density_aware_chamfer_is_as_precise_as_its_points_whatever_the_default_dtype(dtype):
    pos, target = torch.zeros(10, 3, dtype=dtype), torch.zeros(3, 3, dtype=dtype)
    pos[:, 0] = torch.arange(10) / 10
    target[:, 0] = torch.tensor([0.0, 100.0, 200.0])
    ptr, target_ptr = torch.tensor([0, 10]), torch.tensor([0, 3])
    for default in (torch.float64, torch.bfloat16, torch.float32):
        torch.set_default_dtype(default)
        try:
            value = density_aware_chamfer_distance(pos, ptr, target, target_ptr, alpha=0.0)
        finally:
            torch.set_default_dtype(torch.float32)
        assert value.dtype == dtype
        # The means of 1 - r / n_y: 1 - (10 / 3) / 10 from `pos`, (0 + 1 / 2 + 1 / 2) / 3 back.
        assert abs(value.item() - 0.5) <= 2 * torch.finfo(dtype).eps


def test_trimming_ignores_objects_that_only_the_target_contains():
    generator = torch.Generator().manual_seed(0)
    pos, ptr = torch.rand(100, 3, generator=generator), torch.tensor([0, 100])
    target = pos.clone()
    target[90:] += 5
    whole, trimmed = (
        density_aware_chamfer_distance(pos, ptr, target, ptr, alpha=4.0, trim=trim)
        for trim in (0.0, 0.1)
    )
    # Half of the 10 % that are far away, and a little by their share in the terms of others.
    assert 0.045 < float(whole - trimmed) < 0.07
    with pytest.raises(ValueError, match="trim"):
        density_aware_chamfer_distance(pos, ptr, pos, ptr, alpha=4.0, trim=1.0)


def test_crowding_raises_density_aware_chamfer_more_than_chamfer():
    generator = torch.Generator().manual_seed(0)
    target = torch.rand(200, 3, generator=generator)
    even = target + 0.02 * torch.randn(200, 3, generator=generator)
    crowded = even.clone()
    crowded[50:] = even[:50].repeat(3, 1)
    ptr = torch.tensor([0, 200])
    losses = [
        [float(loss(pos, ptr, target, ptr)) for pos in (even, crowded)]
        for loss in (LOSSES["density-aware"], chamfer_distance)
    ]
    assert losses[0][1] > 2 * losses[0][0] and losses[1][1] > losses[1][0]


def test_repulsion_pushes_close_points_apart_and_leaves_others_alone():
    pos = torch.tensor([[0.0, 0, 0], [0.1, 0, 0], [5, 0, 0], [9, 0, 0]], requires_grad=True)
    value = repulsion_loss(pos, torch.tensor([0, 3, 4]), k=2, radius=torch.tensor([0.5, 9.0]))
    torch.testing.assert_close(value, torch.tensor([2 * 0.4 / 6, 0.0]))
    (gradient,) = torch.autograd.grad(value.sum(), pos)
    assert gradient[0, 0] > 0 > gradient[1, 0] and not gradient[2:].any()
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        repulsion_loss(pos, torch.tensor([0, 4]), k=0, radius=1.0)


def test_point_to_plane_measures_the_height_above_the_surface_only():
    grid = torch.cartesian_prod(torch.arange(5.0), torch.arange(5.0))
    target = torch.nn.functional.pad(grid, (0, 1))
    pos = target + torch.tensor([0.3, -0.2, 0.07])
    normals = torch.tensor([0.0, 0.0, -1.0]).expand(25, 3)
    ptr = torch.tensor([0, 25])
    value = point_to_plane_distance(pos, ptr, target, ptr, normals)
    torch.testing.assert_close(value, torch.tensor([0.07]))
