from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial import cKDTree
from torch import Tensor

from pointup.geometry import thinning
from pointup.geometry.packed import ptr_from_sizes
from pointup.geometry.thinning import (
    _throw_darts,
    farthest_point_sample,
    poisson_disk_subset,
)

Sample = Callable[[Tensor, Tensor, Tensor], Tensor]
# No deadline: the time depends on the load of the machine.
quick = settings(deadline=None, max_examples=40)


def sample_on_any_device(pos: Tensor, ptr: Tensor, num_samples: Tensor) -> Tensor:
    """The search of devices other than the CPU, on the CPU."""

    def instead(pos: Tensor, bounds: list[int], counts: list[int]) -> Tensor:
        return thinning._sample_all_clouds(pos, torch.tensor(bounds), bounds, counts)

    with mock.patch.object(thinning, "_sample_buckets", instead):
        return farthest_point_sample(pos, ptr, num_samples)


def sample_by_tree(pos: Tensor, ptr: Tensor, num_samples: Tensor) -> Tensor:
    """The tree that serves many picks, for few."""
    with mock.patch.object(thinning, "_PICKS_FROM_BUCKETS", 0):
        return farthest_point_sample(pos, ptr, num_samples)


def on_sphere(num_points: int) -> np.ndarray:
    points = np.random.default_rng(0).normal(size=(num_points, 3))
    return points / np.linalg.norm(points, axis=1, keepdims=True)


def gap_and_reach(points: np.ndarray, index: np.ndarray) -> tuple[float, float]:
    """Smallest distance within the subset, and largest from any point to it."""
    tree = cKDTree(points[index])
    gaps, reach = tree.query(points[index], k=[2])[0], tree.query(points, k=[1])[0]
    return np.min(gaps), np.max(reach)


every_sampler = pytest.mark.parametrize(
    "sample", [farthest_point_sample, sample_by_tree, sample_on_any_device]
)


@st.composite
def clouds_to_thin(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """Clouds of up to 60 points, some on a coarse grid with duplicates, and how many to keep."""
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    sizes = draw(st.lists(st.integers(0, 60), max_size=4))
    counts = [draw(st.integers(0, size)) for size in sizes]
    shape = (sum(sizes), 3)
    pos = rng.integers(0, 3, shape) if draw(st.booleans()) else rng.normal(size=shape)
    ptr = ptr_from_sizes(torch.tensor(sizes, dtype=torch.int64))
    return torch.tensor(pos, dtype=torch.float32), ptr, torch.tensor(counts, dtype=torch.int64)


@every_sampler
@quick
@given(clouds=clouds_to_thin())
def test_each_pick_is_the_farthest_from_earlier_picks(
    sample: Sample, clouds: tuple[Tensor, Tensor, Tensor]
) -> None:
    pos, ptr, counts = clouds
    index = sample(*clouds)
    assert index.dtype == torch.int64 and len(index.unique()) == len(index) == counts.sum()
    for cloud, picks in enumerate(index.split(counts.tolist())):
        start, stop = int(ptr[cloud]), int(ptr[cloud + 1])
        assert ((picks >= start) & (picks < stop)).all()
        for step in range(1, len(picks)):
            to_earlier = torch.cdist(pos[start:stop].double(), pos[picks[:step]].double()).amin(1)
            assert to_earlier[picks[step] - start] >= to_earlier.max() * (1 - 1e-5)


@every_sampler
@quick
@given(clouds=clouds_to_thin())
def test_a_cloud_has_the_same_subset_in_any_batch(
    sample: Sample, clouds: tuple[Tensor, Tensor, Tensor]
) -> None:
    pos, ptr, counts = clouds
    together = sample(*clouds)
    alone = [
        ptr[i] + sample(pos[ptr[i] : ptr[i + 1]], ptr[i : i + 2] - ptr[i], counts[i : i + 1])
        for i in range(len(counts))
    ]
    assert torch.equal(together, torch.cat([counts[:0], *alone]))


@every_sampler
def test_duplicates_follow_in_the_order_of_their_indices(sample: Sample) -> None:
    pos = torch.zeros(40, 3)
    pos[10], pos[20] = 1.0, 2.0
    index = sample(pos, torch.tensor([0, 40]), torch.tensor([9]))
    first = [i for i in index[:3].tolist() if i not in (10, 20)]
    assert {10, 20} < set(index[:3].tolist()) and len(first) == 1
    assert index[3:].tolist() == [i for i in range(9) if i not in first][:6]


def test_mass_duplicates_never_reach_the_buckets() -> None:
    # A bucket of equal points is searched at each pick, in quadratic time.
    pos = torch.cat([torch.rand(50, 3), torch.zeros(5000, 3)])
    with mock.patch.object(
        thinning.fpsample,
        "bucket_fps_kdline_sampling",
        side_effect=thinning.fpsample.bucket_fps_kdline_sampling,
    ) as buckets:
        index = farthest_point_sample(pos, torch.tensor([0, 5050]), torch.tensor([4000]))
    assert len(buckets.call_args.args[0]) == 51
    assert len(index.unique()) == 4000


def test_map_coordinates_are_thinned_as_finely_as_local_ones() -> None:
    rng = np.random.default_rng(0)
    pos = torch.tensor(np.round(rng.random((500, 3)), 3))
    offset = torch.tensor([431_000.0, 4_582_000.0, 300.0], dtype=torch.float64)
    ptr, counts = torch.tensor([0, 500]), torch.tensor([100])
    index = farthest_point_sample(pos + offset, ptr, counts)
    gap, reach = gap_and_reach(pos.numpy(), index.numpy())
    assert gap >= 0.99 * reach


@every_sampler
def test_half_precision_and_points_with_gradients_can_be_thinned(sample: Sample) -> None:
    pos, ptr, counts = torch.rand(30, 3).bfloat16(), torch.tensor([0, 30]), torch.tensor([5])
    assert torch.equal(sample(pos.requires_grad_(), ptr, counts), sample(pos.float(), ptr, counts))


@every_sampler
def test_invalid_input_of_thinning_is_refused(sample: Sample) -> None:
    pos, ptr = torch.zeros(5, 3), torch.tensor([0, 3, 5])
    with pytest.raises(ValueError, match="3 distinct points of cloud 1, it has 2"):
        sample(pos, ptr, torch.tensor([3, 3]))
    pos[4] = torch.nan
    with pytest.raises(ValueError, match="cloud 1"):
        sample(pos, ptr, torch.tensor([1, 1]))


def test_a_poisson_disk_subset_is_as_even_as_farthest_points() -> None:
    points = on_sphere(5000)
    gap, reach = gap_and_reach(points, poisson_disk_subset(points, 1000, np.random.default_rng(1)))
    farthest = farthest_point_sample(
        torch.tensor(points), torch.tensor([0, 5000]), torch.tensor([1000])
    )
    farthest_gap, farthest_reach = gap_and_reach(points, farthest.numpy())
    assert gap > 0.95 * farthest_gap and reach < 1.1 * farthest_reach
    assert gap > 0.95 * reach


@pytest.mark.parametrize("radius", [0.05, 0.3])
def test_darts_lie_apart_and_leave_no_room_for_another(radius: float) -> None:
    points = on_sphere(2000)
    darts = _throw_darts(points, radius)
    distance = np.linalg.norm(points[:, None] - points[darts], axis=2)
    assert distance.min(axis=1).max() <= radius
    assert (distance[darts] + np.diag([np.inf] * len(darts))).min() > radius


def test_a_poisson_disk_subset_depends_on_the_generator_alone() -> None:
    points = on_sphere(2000)
    subsets = [poisson_disk_subset(points, 300, np.random.default_rng(seed)) for seed in (3, 3, 4)]
    moved = poisson_disk_subset(4 * points + 1024, 300, np.random.default_rng(3))
    assert np.array_equal(subsets[0], subsets[1]) and np.array_equal(subsets[0], moved)
    assert len(np.intersect1d(subsets[0], subsets[2])) < 150


@quick
@given(
    st.sampled_from(["plane", "line", "solid", "equal", "clumps", "grid"]),
    st.integers(1, 400),
    st.data(),
)
def test_a_poisson_disk_subset_has_exactly_the_requested_size(
    kind: str, num_points: int, data: st.DataObject
) -> None:
    num_samples = data.draw(st.integers(0, num_points))
    rng = np.random.default_rng(num_points)
    points = {
        "plane": rng.random((num_points, 3)) * [5, 1, 0],
        "line": rng.random((num_points, 1)) * [1.0, 1.0, 2.0],
        "solid": rng.random((num_points, 3)),
        "equal": np.ones((num_points, 3)),
        "clumps": 10.0 ** rng.uniform(-9, 6, size=(num_points, 3)),
        "grid": rng.integers(0, 3, size=(num_points, 3)).astype(float),
    }[kind]
    index = poisson_disk_subset(points, num_samples, rng)
    assert len(index) == num_samples and (np.diff(index) > 0).all()
    distinct = len(np.unique(points, axis=0))
    assert len(np.unique(points[index], axis=0)) == min(num_samples, distinct)


def test_more_poisson_disk_samples_than_points_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot pick 4 distinct points of 3"):
        poisson_disk_subset(np.zeros((3, 3)), 4, np.random.default_rng(0))
