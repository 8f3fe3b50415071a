from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pointup.geometry.packed import (
    batch_from_ptr,
    copied_ahead,
    ptr_from_sizes,
    rows_of_clouds,
    segment_max,
    segment_mean,
    segment_rank,
    segment_sum,
    sizes_from_ptr,
)

# No deadline: the time depends on the load of the machine.
quick = settings(deadline=None, max_examples=40)
sizes_of_clouds = st.lists(st.integers(0, 9), max_size=6)


def random_values(sizes: list[int], *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(sizes))
    return torch.randn(sum(sizes), *shape, dtype=dtype, generator=generator)


@quick
@given(sizes_of_clouds)
def test_ptr_sizes_and_batch_agree(sizes):
    ptr = ptr_from_sizes(torch.tensor(sizes, dtype=torch.int64))
    expected = [cloud for cloud, size in enumerate(sizes) for _ in range(size)]
    assert ptr.dtype == torch.int64 and ptr.tolist()[-1] == sum(sizes)
    assert sizes_from_ptr(ptr).tolist() == sizes
    assert batch_from_ptr(ptr).tolist() == expected
    assert batch_from_ptr(ptr, sum(sizes)).tolist() == expected


@quick
@given(sizes_of_clouds, st.data())
def test_rows_of_clouds_come_cloud_by_cloud(sizes, data):
    ptr = ptr_from_sizes(torch.tensor(sizes, dtype=torch.int64))
    some = st.lists(st.integers(0, len(sizes) - 1), max_size=8) if sizes else st.just([])
    clouds = data.draw(some)
    rows = rows_of_clouds(ptr, torch.tensor(clouds, dtype=torch.int64))
    bounds = ptr.tolist()
    assert rows.tolist() == [r for c in clouds for r in range(bounds[c], bounds[c + 1])]


@quick
@given(sizes_of_clouds)
def test_segment_reductions_equal_a_loop_over_the_clouds(sizes):
    for shape in [(), (3,), (2, 4)]:
        values = random_values(sizes, *shape)
        ptr = ptr_from_sizes(torch.tensor(sizes, dtype=torch.int64))
        zero = torch.zeros(shape)
        clouds = values.split(sizes) if sizes else ()
        for reduce, one in [
            (segment_sum, lambda cloud: cloud.sum(0)),
            (segment_mean, lambda cloud: cloud.mean(0)),
            (segment_max, lambda cloud: cloud.amax(0)),
        ]:
            expected = [one(cloud) if len(cloud) else zero for cloud in clouds]
            result = reduce(values, ptr)
            assert result.dtype == values.dtype and result.shape == (len(sizes), *shape)
            if sizes:
                torch.testing.assert_close(result, torch.stack(expected))


@quick
@given(sizes_of_clouds)
def test_ranks_sort_each_cloud_separately(sizes):
    values = random_values(sizes)
    ptr = ptr_from_sizes(torch.tensor(sizes, dtype=torch.int64))
    rank = segment_rank(values, ptr)
    ordered = torch.empty_like(values)
    ordered[ptr[batch_from_ptr(ptr)] + rank] = values
    expected = [cloud.sort().values for cloud in values.split(sizes)] if sizes else []
    assert torch.equal(ordered, torch.cat([torch.empty(0), *expected]))


@pytest.mark.parametrize("reduce", [segment_sum, segment_mean, segment_max])
def test_segment_gradients_agree_with_finite_differences(reduce):
    values = random_values([3, 0, 4], 2, dtype=torch.float64).requires_grad_()
    ptr = torch.tensor([0, 3, 3, 7])
    assert torch.autograd.gradcheck(lambda v: reduce(v, ptr), values)


@pytest.mark.parametrize("reduce", [segment_sum, segment_mean])
def test_a_cloud_has_bitwise_the_same_sum_in_any_batch(reduce):
    sizes = [5000, 1, 0, 3000]
    values = 1e4 + random_values(sizes)
    together = reduce(values, ptr_from_sizes(torch.tensor(sizes)))
    alone = [reduce(cloud, torch.tensor([0, len(cloud)])) for cloud in values.split(sizes)]
    assert torch.equal(together, torch.cat(alone))


def test_the_mean_of_many_float32_values_is_right_to_the_last_bit():
    values = 1000 + random_values([100_000])
    expected = values.double().mean().float()
    assert torch.equal(segment_mean(values, torch.tensor([0, 100_000])), expected[None])


def test_sums_of_integers_are_integers():
    flags = torch.tensor([1, 1, 1, 0], dtype=torch.int64)
    assert segment_sum(flags, torch.tensor([0, 3, 4])).tolist() == [3, 0]


def test_copies_go_on_in_the_background_only_where_torch_keeps_their_source():
    kinds = ("cuda", "xpu", "mps", "cpu")
    assert [copied_ahead(torch.device(kind)) for kind in kinds] == [True, True, False, False]
    for path in (Path(__file__).parents[2] / "pointup").rglob("*.py"):
        assert "non_blocking=True" not in path.read_text(), path
