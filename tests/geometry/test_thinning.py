"""Thinning: farthest points, Poisson disks, spacings that differ from place to place, radii."""

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
    coarser_samples,
    copies,
    farthest_point_sample,
    insertion_radii,
    log_pick_distances,
    poisson_disk_subset,
    sample_by_spacing,
)

Sample = Callable[[Tensor, Tensor, Tensor], Tensor]
# No deadline: the time depends on the load of the machine.
quick = settings(deadline=None, max_examples=40)


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


every_sampler = pytest.mark.parametrize("sample", [farthest_point_sample, sample_by_tree])


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
def test_each_pick_is_the_farthest_from_earlier_picks(sample, clouds):
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
def test_a_cloud_has_the_same_subset_in_any_batch(sample, clouds):
    pos, ptr, counts = clouds
    together = sample(*clouds)
    alone = [
        ptr[i] + sample(pos[ptr[i] : ptr[i + 1]], ptr[i : i + 2] - ptr[i], counts[i : i + 1])
        for i in range(len(counts))
    ]
    assert torch.equal(together, torch.cat([counts[:0], *alone]))


@every_sampler
def test_duplicates_follow_in_the_order_of_their_indices(sample):
    pos = torch.zeros(40, 3)
    pos[10], pos[20] = 1.0, 2.0
    index = sample(pos, torch.tensor([0, 40]), torch.tensor([9]))
    first = [i for i in index[:3].tolist() if i not in (10, 20)]
    assert {10, 20} < set(index[:3].tolist()) and len(first) == 1
    assert index[3:].tolist() == [i for i in range(9) if i not in first][:6]


def test_mass_duplicates_never_reach_the_buckets():
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


def test_map_coordinates_are_thinned_as_finely_as_local_ones():
    rng = np.random.default_rng(0)
    pos = torch.tensor(np.round(rng.random((500, 3)), 3))
    offset = torch.tensor([431_000.0, 4_582_000.0, 300.0], dtype=torch.float64)
    ptr, counts = torch.tensor([0, 500]), torch.tensor([100])
    index = farthest_point_sample(pos + offset, ptr, counts)
    gap, reach = gap_and_reach(pos.numpy(), index.numpy())
    assert gap >= 0.99 * reach


@every_sampler
def test_half_precision_and_points_with_gradients_can_be_thinned(sample):
    pos, ptr, counts = torch.rand(30, 3).bfloat16(), torch.tensor([0, 30]), torch.tensor([5])
    assert torch.equal(sample(pos.requires_grad_(), ptr, counts), sample(pos.float(), ptr, counts))


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_thins_as_the_model_itself():
    points, ptr, number = torch.rand(60, 3), torch.tensor([0, 60]), torch.tensor([20])
    compiled = torch.compile(farthest_point_sample, backend="eager")
    assert torch.equal(compiled(points, ptr, number), farthest_point_sample(points, ptr, number))


@every_sampler
def test_invalid_input_of_thinning_is_refused(sample):
    pos, ptr = torch.zeros(5, 3), torch.tensor([0, 3, 5])
    with pytest.raises(ValueError, match="3 distinct points of cloud 1, it has 2"):
        sample(pos, ptr, torch.tensor([3, 3]))
    pos[4] = torch.nan
    with pytest.raises(ValueError, match="cloud 1"):
        sample(pos, ptr, torch.tensor([1, 1]))


def test_a_poisson_disk_subset_is_as_even_as_farthest_points():
    points = on_sphere(5000)
    gap, reach = gap_and_reach(points, poisson_disk_subset(points, 1000, np.random.default_rng(1)))
    farthest = farthest_point_sample(
        torch.tensor(points), torch.tensor([0, 5000]), torch.tensor([1000])
    )
    farthest_gap, farthest_reach = gap_and_reach(points, farthest.numpy())
    assert gap > 0.95 * farthest_gap and reach < 1.1 * farthest_reach
    assert gap > 0.95 * reach


@pytest.mark.parametrize("radius", [0.05, 0.3])
def test_darts_lie_apart_and_leave_no_room_for_another(radius):
    points = on_sphere(2000)
    darts = _throw_darts(points, radius)
    distance = np.linalg.norm(points[:, None] - points[darts], axis=2)
    assert distance.min(axis=1).max() <= radius
    assert (distance[darts] + np.diag([np.inf] * len(darts))).min() > radius


def test_a_poisson_disk_subset_depends_on_the_generator_alone():
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
def test_a_poisson_disk_subset_has_exactly_the_requested_size(kind, num_points, data):
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


def test_more_poisson_disk_samples_than_points_are_refused():
    with pytest.raises(ValueError, match="cannot pick 4 distinct points of 3"):
        poisson_disk_subset(np.zeros((3, 3)), 4, np.random.default_rng(0))


def test_equal_spacings_give_the_farthest_points():
    pos, ptr = torch.rand(900, 3), torch.tensor([0, 300, 300, 900])
    wanted = torch.tensor([100, 0, 250])
    expected = farthest_point_sample(pos, ptr, wanted)
    for spacing in (0.0, -1.5):
        log_spacing = torch.full((900,), spacing)
        assert torch.equal(sample_by_spacing(pos, ptr, wanted, log_spacing), expected)


def test_half_the_spacing_gives_four_times_the_points_with_the_same_evenness():
    pos = torch.rand(8000, 3) * torch.tensor([2, 1, 0])
    dense = pos[:, 0] < 1
    log_spacing = torch.where(dense, 0.5, 1.0).log()
    index = sample_by_spacing(pos, torch.tensor([0, 8000]), torch.tensor([1500]), log_spacing)
    kept_dense = int(dense[index].sum())
    assert 3.0 < kept_dense / (1500 - kept_dense) < 4.6
    for side, in_place in ((0.5, dense[index]), (1.0, ~dense[index])):
        points = pos[index][in_place]
        gap = (torch.cdist(points, points) + 9 * torch.eye(len(points))).amin(1)
        # The bound of farthest points: at worst half the spacing of the best set of this size.
        assert gap.min() > 0.4 * side * (2 / 1500 / 0.8) ** 0.5


def test_clouds_sampled_piece_by_piece_are_as_even(monkeypatch):
    pos, ptr = torch.rand(9000, 3) * torch.tensor([2, 1, 0]), torch.tensor([0, 1000, 9000])
    wanted, log_spacing = torch.tensor([250, 2000]), 0.01 * pos[:, 0]
    whole = sample_by_spacing(pos, ptr, wanted, log_spacing)
    monkeypatch.setattr(thinning, "LARGEST_PIECE", 2000)
    pieced = sample_by_spacing(pos, ptr, wanted, log_spacing)
    assert len(pieced) == len(pieced.unique()) == 2250
    # The small cloud stays whole; the other is cut into four pieces.
    assert torch.equal(pieced[:250], whole[:250])
    kept = pos[pieced[250:]]
    quarters = torch.bincount((2 * kept[:, 0]).long().clamp(max=3))
    assert quarters.min() > 450 and quarters.max() < 550
    gap = (torch.cdist(kept, kept) + 9 * torch.eye(2000)).amin(1)
    expected = (torch.cdist(pos[whole[250:]], pos[whole[250:]]) + 9 * torch.eye(2000)).amin(1)
    assert float(gap.mean() / expected.mean()) == pytest.approx(1, abs=0.05)


def test_pick_distances_never_rise_and_equal_the_measured_ones():
    pos = torch.rand(471, 3, generator=torch.Generator().manual_seed(0))
    sizes = torch.tensor([400, 0, 1, 2, 68])
    ptr = ptr_from_sizes(sizes)
    ordered = pos[farthest_point_sample(pos, ptr, sizes)]
    estimated = log_pick_distances(ordered, ptr).exp()
    assert estimated[400] == 1
    for start, stop in ((0, 400), (401, 403), (403, 471)):
        alone = log_pick_distances(ordered[start:stop], torch.tensor([0, stop - start])).exp()
        assert torch.equal(alone, estimated[start:stop])
        assert (alone.diff() <= 1e-6).all()
        between = torch.cdist(ordered[start:stop], ordered[start:stop])
        exact = torch.stack([between[i, :i].min() for i in range(1, stop - start)])
        assert ((alone[1:] - exact).abs() < 0.1 * exact + 0.01).all()


def test_points_far_from_the_origin_are_selected_as_near_it():
    """At 1,024 the squares of coordinates are ten million times those of the spacing."""
    steps = torch.randint(0, 5 * 2048, (1500, 3), generator=torch.Generator().manual_seed(0))
    pos = steps / 2048  # Exact in float32 at 1,024, too.
    ptr, wanted, log_spacing = torch.tensor([0, 1500]), torch.tensor([500]), 0.05 * pos[:, 0]
    near = sample_by_spacing(pos, ptr, wanted, log_spacing)
    far = sample_by_spacing(pos + 1024, ptr, wanted, log_spacing)
    assert len(set(near.tolist()) & set(far.tolist())) >= 495


few = settings(deadline=None, max_examples=25)


def sample_as_elsewhere(
    pos: Tensor, ptr: Tensor, num_samples: Tensor, log_spacing: Tensor
) -> Tensor:
    """`sample_by_spacing` of devices other than the CPU, on the CPU."""

    def pick_distances(pos: Tensor, ptr: Tensor) -> tuple[Tensor, Tensor]:
        return torch.arange(len(pos)), insertion_radii(pos, ptr, num_samples).log()

    with mock.patch.object(thinning, "_pick_distances", pick_distances):
        return sample_by_spacing(pos, ptr, num_samples, log_spacing)


@few
@given(st.lists(st.integers(0, 15), max_size=4), st.integers(0, 2**31))
def test_radii_of_small_clouds_are_distances_to_all_earlier_picks(sizes, seed):
    generator = torch.Generator().manual_seed(seed)
    counts, ptr = torch.tensor(sizes, dtype=torch.int64), ptr_from_sizes(torch.tensor(sizes).long())
    pos = torch.randn(int(ptr[-1]), 3, generator=generator)
    radius = insertion_radii(pos, ptr, counts)
    for start, stop in zip(ptr[:-1].tolist(), ptr[1:].tolist(), strict=True):
        points, of_cloud = pos[start:stop].double(), radius[start:stop].double()
        distance = torch.full((stop - start,), torch.inf, dtype=torch.float64)
        for pick in of_cloud.argsort(descending=True).tolist():
            assert distance[pick] == pytest.approx(float(of_cloud[pick]), rel=1e-5)
            assert distance[pick] >= distance.amax() * (1 - 1e-5)
            distance = torch.minimum(distance, (points - points[pick]).norm(dim=1))
            distance[pick] = 0.0


def test_no_point_is_nearer_to_an_earlier_pick_than_its_radius():
    generator = torch.Generator().manual_seed(0)
    ptr = torch.tensor([0, 900, 900, 2000])
    pos = torch.rand(2000, 3, generator=generator) * torch.tensor([2.0, 1.0, 0.0])
    radius = insertion_radii(pos, ptr, torch.tensor([300, 0, 400]))
    assert (radius > 0).all()
    for points, of_cloud in zip(pos.split([900, 1100]), radius.split([900, 1100]), strict=True):
        between = (points[:, None] - points[None]).square().sum(2).sqrt()
        before = of_cloud[None] > of_cloud[:, None]
        nearest = between.masked_fill(~before, torch.inf).amin(1)
        # The coarsest sample leaves the rest unsettled.
        fine = of_cloud <= of_cloud.median()
        assert (of_cloud[fine] <= nearest[fine] * (1 + 1e-5)).all()
        # A point of the coarser sample may keep its bound from there.
        exact = of_cloud[fine] >= nearest[fine] * (1 - 1e-5)
        assert exact.float().mean() > 0.98


@pytest.mark.parametrize("sample", [sample_by_spacing, sample_as_elsewhere])
@few
@given(st.lists(st.tuples(st.integers(0, 90), st.floats(0, 1)), max_size=4), st.integers(0, 2**31))
def test_each_cloud_keeps_its_number_of_distinct_points(sample, clouds, seed):
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.tensor([size for size, _ in clouds], dtype=torch.int64)
    counts = torch.tensor([round(size * share) for size, share in clouds], dtype=torch.int64)
    ptr = ptr_from_sizes(sizes)
    # Few distinct positions.
    pos = torch.randint(0, 4, (int(ptr[-1]), 3), generator=generator).float()
    index = sample(pos, ptr, counts, torch.randn(len(pos), generator=generator))
    assert len(index) == int(counts.sum()) == len(index.unique())
    cloud = torch.searchsorted(ptr, index, right=True) - 1
    assert torch.equal(torch.bincount(cloud, minlength=len(counts)), counts)


def test_no_duplicate_is_kept_before_all_distinct_points_are():
    generator = torch.Generator().manual_seed(0)
    pos = torch.cat([torch.zeros(200, 3), torch.rand(100, 3, generator=generator) + 1])
    ptr, wanted = torch.tensor([0, 300]), torch.tensor([101])
    index = sample_as_elsewhere(pos, ptr, wanted, 1e-3 * pos[:, 0])
    assert len(pos[index].unique(dim=0)) == 101


def unevenness_and_reach(pos: Tensor, index: Tensor, spacing: Tensor) -> tuple[float, float]:
    """Coefficient of variation of the distance to the nearest other kept point, and mean squared
    distance from all points to the kept ones, both in units of the spacing."""
    tree = cKDTree(pos[index].numpy())
    gap = torch.from_numpy(tree.query(pos[index].numpy(), k=[2])[0][:, 0]) / spacing[index]
    reach = torch.from_numpy(tree.query(pos.numpy())[0]) / spacing
    return float(gap.std() / gap.mean()), float(reach.square().mean())


@pytest.mark.parametrize("kind", ["slope of density", "random spacing"])
def test_the_spread_is_as_even_as_that_of_farthest_points(kind, monkeypatch):
    monkeypatch.setattr(thinning, "LARGEST_PIECE", 10**9)
    generator = torch.Generator().manual_seed(1)
    pos = torch.rand(6000, 3, generator=generator) * torch.tensor([1.0, 1.0, 0.0])
    spacing = 1 + 1e-4 * pos[:, 0]
    if kind == "slope of density":
        pos[:, 0] = pos[:, 0] ** 2
    else:
        spacing = torch.exp(0.5 * torch.sin(9 * pos[:, 0]) * torch.sin(7 * pos[:, 1]))
    ptr, wanted = torch.tensor([0, 6000]), torch.tensor([3000])
    expected = unevenness_and_reach(
        pos, sample_by_spacing(pos, ptr, wanted, spacing.log()), spacing
    )
    found = unevenness_and_reach(pos, sample_as_elsewhere(pos, ptr, wanted, spacing.log()), spacing)
    # Farthest points with another start differ by up to 2 %; on average both are the same.
    for ours, theirs in zip(found, expected, strict=True):
        assert ours < 1.04 * theirs


def test_coarser_samples_leave_no_holes_where_few_points_are_kept():
    generator = torch.Generator().manual_seed(1)
    pos = torch.rand(6000, 3, generator=generator) * torch.tensor([1.0, 1.0, 0.0])
    spacing, ptr, wanted = 1 + 1e-4 * pos[:, 0], torch.tensor([0, 6000]), torch.tensor([300])
    expected = sample_by_spacing(pos, ptr, wanted, spacing.log())
    found = sample_as_elsewhere(pos, ptr, wanted, spacing.log())
    # Without coarser samples the CV is 1.6 times as large, and the squared distance twice.
    cv, reach = unevenness_and_reach(pos, expected, spacing)
    ours = unevenness_and_reach(pos, found, spacing)
    assert ours[0] < 1.4 * cv and ours[1] < 1.1 * reach


def test_samples_are_coarse_enough_for_the_counts_and_link_equal_points():
    ptr = torch.tensor([0, 1000, 1000, 1001, 1050])
    row, parent, node_ptr = coarser_samples(ptr, torch.tensor([200, 0, 1, 30]))
    sizes = (node_ptr[1:] - node_ptr[:-1]).reshape(-1, 4)
    assert torch.equal(sizes[0], torch.tensor([1000, 0, 1, 49]))
    assert sizes[-1, 0] <= 200 / thinning.SHARE and (sizes[-1] <= 50).all()
    assert torch.equal(row[:1050], torch.arange(1050))
    cloud = torch.searchsorted(ptr, row, right=True) - 1
    segment = torch.searchsorted(node_ptr, torch.arange(len(row)), right=True) - 1
    assert torch.equal(segment % 4, cloud)
    has_parent = parent >= 0
    assert int(has_parent.sum()) == int(sizes[1:].sum())
    assert torch.equal(row[parent[has_parent]], row[has_parent])
    assert (parent[has_parent] >= node_ptr[4]).all()


def test_all_but_the_first_of_equal_points_of_a_cloud_are_copies():
    pos = torch.tensor([[0.0, 0, 0], [1, 0, 0], [-0.0, 0, 0], [1, 0, 0], [1, 0, 0], [0, 1, 0]])
    found = copies(pos, torch.tensor([0, 3, 6]))
    assert found.tolist() == [False, False, True, False, True, False]
    assert torch.equal(copies(pos.double(), torch.tensor([0, 3, 6])), found)


def test_an_error_about_points_that_are_not_finite_names_the_cloud():
    pos = torch.zeros(5, 3)
    pos[4, 1] = torch.nan
    with pytest.raises(ValueError, match="cloud 1"):
        insertion_radii(pos, torch.tensor([0, 3, 5]), torch.tensor([1, 1]))
