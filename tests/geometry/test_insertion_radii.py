"""Insertion radii and thinning by them, against their definition and the CPU's thinning."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial import cKDTree
from test_adaptive_thinning import clouds_with_duplicates, expect_counts
from torch import Tensor

from pointup.geometry import thinning as adaptive
from pointup.geometry import thinning as insertion
from pointup.geometry.packed import ptr_from_sizes
from pointup.geometry.thinning import coarser_samples, copies, insertion_radii, sample_by_spacing

few = settings(deadline=None, max_examples=25)


def sample_as_elsewhere(
    pos: Tensor, ptr: Tensor, num_samples: Tensor, log_spacing: Tensor
) -> Tensor:
    """`sample_by_spacing` of devices other than the CPU, on the CPU."""

    def pick_distances(pos: Tensor, ptr: Tensor) -> tuple[Tensor, Tensor]:
        return torch.arange(len(pos)), insertion_radii(pos, ptr, num_samples).log()

    with mock.patch.object(adaptive, "_pick_distances", pick_distances):
        return sample_by_spacing(pos, ptr, num_samples, log_spacing)


@few
@given(st.lists(st.integers(0, 15), max_size=4), st.integers(0, 2**31))
def test_radii_of_small_clouds_are_distances_to_all_earlier_picks(
    sizes: list[int], seed: int
) -> None:
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


def test_no_point_is_nearer_to_an_earlier_pick_than_its_radius() -> None:
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


@few
@given(st.lists(st.tuples(st.integers(0, 90), st.floats(0, 1)), max_size=4), st.integers(0, 2**31))
def test_each_cloud_keeps_the_requested_number_of_distinct_points(
    clouds: list[tuple[int, float]], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    pos, ptr, counts = clouds_with_duplicates(clouds, generator)
    spacing = 0.1 + torch.rand(len(pos), generator=generator)
    index = sample_as_elsewhere(pos, ptr, counts, spacing.log())
    expect_counts(index, ptr, counts)


def test_no_duplicate_is_kept_before_all_distinct_points_are() -> None:
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
def test_the_spread_is_as_even_as_that_of_farthest_points(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adaptive, "LARGEST_PIECE", 10**9)
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


def test_coarser_samples_leave_no_holes_where_few_points_are_kept() -> None:
    generator = torch.Generator().manual_seed(1)
    pos = torch.rand(6000, 3, generator=generator) * torch.tensor([1.0, 1.0, 0.0])
    spacing, ptr, wanted = 1 + 1e-4 * pos[:, 0], torch.tensor([0, 6000]), torch.tensor([300])
    expected = sample_by_spacing(pos, ptr, wanted, spacing.log())
    found = sample_as_elsewhere(pos, ptr, wanted, spacing.log())
    # Without coarser samples the CV is 1.6 times as large, and the squared distance twice.
    cv, reach = unevenness_and_reach(pos, expected, spacing)
    ours = unevenness_and_reach(pos, found, spacing)
    assert ours[0] < 1.4 * cv and ours[1] < 1.1 * reach


def test_samples_are_coarse_enough_for_the_counts_and_link_equal_points() -> None:
    ptr = torch.tensor([0, 1000, 1000, 1001, 1050])
    row, parent, node_ptr = coarser_samples(ptr, torch.tensor([200, 0, 1, 30]))
    sizes = (node_ptr[1:] - node_ptr[:-1]).reshape(-1, 4)
    assert torch.equal(sizes[0], torch.tensor([1000, 0, 1, 49]))
    assert sizes[-1, 0] <= 200 / insertion.SHARE and (sizes[-1] <= 50).all()
    assert torch.equal(row[:1050], torch.arange(1050))
    cloud = torch.searchsorted(ptr, row, right=True) - 1
    segment = torch.searchsorted(node_ptr, torch.arange(len(row)), right=True) - 1
    assert torch.equal(segment % 4, cloud)
    has_parent = parent >= 0
    assert int(has_parent.sum()) == int(sizes[1:].sum())
    assert torch.equal(row[parent[has_parent]], row[has_parent])
    assert (parent[has_parent] >= node_ptr[4]).all()


def test_all_but_the_first_of_equal_points_of_a_cloud_are_copies() -> None:
    pos = torch.tensor([[0.0, 0, 0], [1, 0, 0], [-0.0, 0, 0], [1, 0, 0], [1, 0, 0], [0, 1, 0]])
    found = copies(pos, torch.tensor([0, 3, 6]))
    assert found.tolist() == [False, False, True, False, True, False]
    assert torch.equal(copies(pos.double(), torch.tensor([0, 3, 6])), found)


def test_an_error_about_points_that_are_not_finite_names_the_cloud() -> None:
    pos = torch.zeros(5, 3)
    pos[4, 1] = torch.nan
    with pytest.raises(ValueError, match="cloud 1"):
        insertion_radii(pos, torch.tensor([0, 3, 5]), torch.tensor([1, 1]))
