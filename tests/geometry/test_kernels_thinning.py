"""The Triton kernels of thinning fulfil its contract; run as those of test_kernels.py."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from test_kernels import DEVICE, needs_device, needs_gpu, needs_triton, ragged
from test_kernels import on_kernels as on_kernels
from torch import Tensor

from pointup.geometry.thinning import farthest_point_sample

pytestmark = [needs_triton, pytest.mark.usefixtures("on_kernels")]


@pytest.fixture(params=["in registers", "in tiles"])
def way_to_thin(request: pytest.FixtureRequest) -> Iterator[None]:
    """Clouds of all sizes are thinned by tiles, which are small, with some groups full."""
    if request.param == "in registers" or importlib.util.find_spec("triton") is None:
        yield
        return
    from pointup.geometry.kernels import farthest

    with mock.patch.multiple(farthest, MAX_IN_REGISTERS=0, TILE=8, BLOCK=64):
        yield


def expect_farthest(pos: Tensor, ptr: Tensor, counts: Tensor, index: Tensor) -> None:
    assert index.dtype == torch.int64 and len(index.unique()) == len(index) == counts.sum()
    for cloud, picks in enumerate(index.split(counts.tolist())):
        start, points = int(ptr[cloud]), pos[ptr[cloud] : ptr[cloud + 1]].double()
        picks = picks - start
        assert (picks[:1] == 0).all()
        distance = torch.full_like(points[:, 0], torch.inf)
        shortfall = distance.new_zeros(len(picks))
        for step, pick in enumerate(picks):
            shortfall[step] = distance.amax() * (1 - 1e-5) - distance[pick]
            distance = torch.minimum(distance, (points - points[pick]).square().sum(1))
        assert (shortfall[1:] <= 0).all()


@needs_device
@pytest.mark.usefixtures("way_to_thin")
def test_each_pick_is_the_farthest_from_earlier_picks() -> None:
    pos, ptr, _, _ = ragged([(3, 0), (0, 0), (90, 0), (1, 0)], offset=100.0)
    counts = torch.tensor([3, 0, 14, 1], device=DEVICE)
    index = farthest_point_sample(pos, ptr, counts)
    expect_farthest(pos, ptr, counts, index)


@needs_device
@pytest.mark.usefixtures("way_to_thin")
def test_duplicates_follow_in_the_order_of_their_indices() -> None:
    pos, ptr = torch.zeros(40, 3, device=DEVICE), torch.tensor([0, 40], device=DEVICE)
    pos[10], pos[20] = 1.0, 2.0
    index = farthest_point_sample(pos, ptr, torch.tensor([9], device=DEVICE))
    assert index.tolist() == [0, 20, 10, 1, 2, 3, 4, 5, 6]


@needs_device
@pytest.mark.usefixtures("way_to_thin")
def test_float64_clouds_are_thinned_down_to_their_last_point() -> None:
    pos, ptr, _, _ = ragged([(12, 0), (20, 0)])
    pos = pos.double() + 4_582_000.0
    counts = torch.tensor([12, 20], device=DEVICE)
    index = farthest_point_sample(pos, ptr, counts)
    expect_farthest(pos, ptr, counts, index)


@needs_device
def test_invalid_input_of_thinning_is_refused() -> None:
    pos, ptr, _, _ = ragged([(3, 0), (2, 0)])
    with pytest.raises(ValueError, match="3 distinct points of cloud 1, it has 2"):
        farthest_point_sample(pos, ptr, torch.tensor([3, 3], device=DEVICE))
    pos[4] = torch.nan
    with pytest.raises(ValueError, match="cloud 1"):
        farthest_point_sample(pos, ptr, torch.tensor([1, 1], device=DEVICE))
    nothing = farthest_point_sample(pos[:3], ptr[:2], torch.tensor([0], device=DEVICE))
    assert nothing.tolist() == []


@needs_gpu
@pytest.mark.parametrize("size", [5_000, 60_000])
def test_farthest_points_of_large_clouds_are_exact(size: int) -> None:
    pos, ptr, _, _ = ragged([(size, 0), (100, 0), (size // 2, 0)])
    counts = torch.tensor([500, 100, 300], device=DEVICE)
    index = farthest_point_sample(pos, ptr, counts)
    expect_farthest(pos, ptr, counts, index)
