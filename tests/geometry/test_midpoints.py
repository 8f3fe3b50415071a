"""Midpoints: anchors of the model and the midpoint baseline."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pointup.geometry.midpoints import (
    midpoint_upsample,
    midpoints,
    output_sizes,
    slots_for_ratio,
)
from pointup.geometry.packed import ptr_from_sizes


@given(
    sizes=st.lists(st.integers(0, 40), max_size=4),
    ratio=st.floats(1.0, 20.0),
)
@example(sizes=[30], ratio=1.05)
@settings(max_examples=50, deadline=None)
def test_each_cloud_gets_exactly_round_of_ratio_times_its_size(sizes, ratio):
    ptr = ptr_from_sizes(torch.tensor(sizes, dtype=torch.int64))
    pos = torch.randn(int(ptr[-1]), 3)
    out, out_ptr = midpoint_upsample(pos, ptr, ratio)
    assert out_ptr.diff().tolist() == [round(ratio * size) for size in sizes]
    assert len(out) == out_ptr[-1]


def test_the_ratio_of_a_pair_gives_back_its_target_size():
    sizes = torch.arange(1, 3000)
    targets = sizes * 3 + sizes % 7
    ratio = targets.double() / sizes
    assert torch.equal(output_sizes(ptr_from_sizes(sizes), ratio), targets)


def test_rounding_errors_of_the_ratio_do_not_add_slots():
    assert slots_for_ratio(torch.tensor([1.0, 1.5, 4.0, 4.0 + 1e-12, 7.3])).tolist() == [
        2, 3, 8, 8, 15,
    ]  # fmt: skip


def test_candidates_are_midpoints_between_a_point_and_its_neighbours():
    pos = torch.tensor([[0.0, 0, 0], [2, 0, 0], [0, 4, 0]])
    index = torch.tensor([[0, 1], [1, 2], [2, -1]])
    expected = [[[0, 0, 0], [1, 0, 0]], [[2, 0, 0], [1, 2, 0]], [[0, 4, 0], [0, 4, 0]]]
    assert midpoints(pos, index).tolist() == expected


@pytest.mark.parametrize("ratio", [0.99, float("nan"), float("inf"), -4.0])
def test_a_ratio_below_one_or_not_finite_is_refused(ratio):
    with pytest.raises(ValueError, match="upsampling ratio"):
        midpoint_upsample(torch.randn(5, 3), torch.tensor([0, 5]), ratio)
