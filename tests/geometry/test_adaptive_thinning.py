"""Thinning in units of a spacing that differs from place to place."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pointup.geometry import thinning as adaptive
from pointup.geometry.packed import ptr_from_sizes
from pointup.geometry.thinning import farthest_point_sample, log_pick_distances, sample_by_spacing


def clouds_with_duplicates(
    clouds: list[tuple[int, float]], generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Clouds of few distinct positions, given by size and share to keep; pos, ptr, and counts."""
    sizes = torch.tensor([size for size, _ in clouds], dtype=torch.int64)
    counts = torch.tensor([round(size * share) for size, share in clouds], dtype=torch.int64)
    ptr = ptr_from_sizes(sizes)
    return torch.randint(0, 4, (int(ptr[-1]), 3), generator=generator).float(), ptr, counts


def expect_counts(index: Tensor, ptr: Tensor, counts: Tensor) -> None:
    """Each cloud keeps its number of points, all of them different."""
    assert len(index) == int(counts.sum()) == len(index.unique())
    cloud = torch.searchsorted(ptr, index, right=True) - 1
    assert torch.equal(torch.bincount(cloud, minlength=len(counts)), counts)


@given(st.lists(st.tuples(st.integers(0, 60), st.floats(0, 1)), max_size=4), st.integers(0, 2**31))
def test_each_cloud_keeps_the_requested_number_of_distinct_points(
    clouds: list[tuple[int, float]], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    pos, ptr, counts = clouds_with_duplicates(clouds, generator)
    index = sample_by_spacing(pos, ptr, counts, torch.randn(len(pos), generator=generator))
    expect_counts(index, ptr, counts)


def test_equal_spacings_give_the_farthest_points() -> None:
    pos, ptr = torch.rand(900, 3), torch.tensor([0, 300, 300, 900])
    wanted = torch.tensor([100, 0, 250])
    expected = farthest_point_sample(pos, ptr, wanted)
    for spacing in (0.0, -1.5):
        log_spacing = torch.full((900,), spacing)
        assert torch.equal(sample_by_spacing(pos, ptr, wanted, log_spacing), expected)


def test_half_the_spacing_gives_four_times_the_points_with_the_same_evenness() -> None:
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


def test_clouds_sampled_piece_by_piece_are_as_even(monkeypatch: pytest.MonkeyPatch) -> None:
    pos, ptr = torch.rand(9000, 3) * torch.tensor([2, 1, 0]), torch.tensor([0, 1000, 9000])
    wanted, log_spacing = torch.tensor([250, 2000]), 0.01 * pos[:, 0]
    whole = sample_by_spacing(pos, ptr, wanted, log_spacing)
    monkeypatch.setattr(adaptive, "LARGEST_PIECE", 2000)
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


def test_pick_distances_never_rise_and_equal_the_measured_ones() -> None:
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


def test_points_far_from_the_origin_are_selected_as_near_it() -> None:
    """At 1,024 the squares of coordinates are ten million times those of the spacing."""
    steps = torch.randint(0, 5 * 2048, (1500, 3), generator=torch.Generator().manual_seed(0))
    pos = steps / 2048  # Exact in float32 at 1,024, too.
    ptr, wanted, log_spacing = torch.tensor([0, 1500]), torch.tensor([500]), 0.05 * pos[:, 0]
    near = sample_by_spacing(pos, ptr, wanted, log_spacing)
    far = sample_by_spacing(pos + 1024, ptr, wanted, log_spacing)
    assert len(set(near.tolist()) & set(far.tolist())) >= 495
