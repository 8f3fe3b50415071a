"""Output that keeps the points of the input: the new ones are placed beside them."""

from __future__ import annotations

import pytest
import torch
from forest_options import FOREST
from hypothesis import given
from hypothesis import strategies as st
from test_model import as_if_trained, packed
from torch import Tensor

from pointup.geometry.packed import ptr_from_sizes
from pointup.model.candidates import Candidates

SIZES, RATIOS = (60, 0, 3, 100), torch.tensor([4.0, 2.0, 1.0, 2.5], dtype=torch.float64)


@pytest.mark.parametrize("options", [{}, FOREST | {"k": 12}])
def test_the_input_is_in_the_output_once_and_all_other_points_are_children(
    options: dict[str, object],
) -> None:
    pos, ptr = packed(*SIZES)
    model = as_if_trained(**options)
    output, children = model(pos, ptr, RATIOS, originals=True), model(pos, ptr, RATIOS).candidates
    assert output.ptr.diff().tolist() == [240, 0, 3, 250]
    assert output.is_new is not None
    for cloud in range(len(SIZES)):
        rows = slice(*output.ptr[cloud : cloud + 2].tolist())
        source = pos[ptr[cloud] : ptr[cloud + 1]]
        kept, is_new = output.pos[rows], output.is_new[rows]
        by_parent = output.parent[rows][~is_new].argsort()
        assert torch.equal(kept[~is_new][by_parent], source)
        assert (torch.cdist(kept[is_new].double(), children.double()) < 1e-6).any(1).all()
    # Without the input the model has the same children: only their selection differs.
    assert len(output.candidates) == len(children) + len(pos)


def test_new_points_keep_away_from_the_input() -> None:
    pos, ptr = packed(400)
    model = as_if_trained()
    beside, alone = (model(pos, ptr, 2.0, originals=kept) for kept in (True, False))
    distance = [
        torch.cdist(points, pos).amin(1) for points in (beside.pos[beside.is_new], alone.pos)
    ]
    assert distance[0].min() > 4 * distance[1].min()
    assert distance[0].mean() > 1.2 * distance[1].mean()


def test_clouds_that_are_reordered_by_their_numbers_of_slots_keep_their_inputs() -> None:
    pos, ptr = packed(40, 50, 30)
    ratios = torch.tensor([2.0, 6.0, 2.0], dtype=torch.float64)
    together = as_if_trained()(pos, ptr, ratios, originals=True)
    for cloud, size in enumerate((40, 50, 30)):
        rows = slice(*together.ptr[cloud : cloud + 2].tolist())
        is_kept = ~together.is_new[rows]
        assert int(is_kept.sum()) == size
        assert torch.equal(together.pos[rows][is_kept], pos[together.parent[rows][is_kept]])


def test_each_new_point_has_a_gradient_and_the_input_has_none() -> None:
    pos, ptr = packed(80)
    output = as_if_trained()(pos, ptr, 3.0, originals=True)
    moved: Tensor = output.pos
    assert moved.requires_grad
    gradient = torch.autograd.grad(moved[~output.is_new].sum(), output.candidates)[0]
    of_input = gradient.any(1)
    assert int(of_input.sum()) == 80
    assert torch.equal(output.candidates[of_input], pos)


@given(st.integers(1, 30), st.integers(1, 40), st.floats(0, 1), st.integers(0, 2**31))
def test_thinning_keeps_the_input_and_the_children_with_the_highest_score(
    num_points: int, num_children: int, share: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    pos = torch.rand(num_points, 3, generator=generator)
    children = torch.rand(num_children, 3, generator=generator)
    ptr, children_ptr = ptr_from_sizes(torch.tensor([num_points])), torch.tensor([0, num_children])
    # Spacings this different decide alone, whatever the order of picks.
    log_spacing = 40.0 * torch.randperm(num_children, generator=generator)
    parent = torch.zeros(num_children, dtype=torch.int64)
    candidates = Candidates(children, children_ptr, parent, log_spacing, None).beside(pos, ptr)
    assert torch.equal(candidates.pos, torch.cat([pos, children]))
    assert candidates.distance is not None
    torch.testing.assert_close(
        candidates.distance[num_points:],
        torch.cdist(children.double(), pos.double()).amin(1).float(),
        atol=1e-5,
        rtol=1e-4,
    )
    num_kept = num_points + round(share * num_children)
    kept = candidates.thinned(torch.tensor([num_kept]))
    expected = log_spacing.argsort()[: num_kept - num_points] + num_points
    assert kept.sort().values.tolist() == [*range(num_points), *expected.sort().values.tolist()]
