"""Neighbourhoods: fitted planes, arches over midpoints, described positions, columns."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pointup.geometry.local_geometry import (
    BRIDGE,
    GAP,
    NUM_FEATURES,
    QUANTILES,
    LocalGeometry,
    arches,
    columns_of,
    describe_columns,
    describe_neighbors_of_children,
    describe_profiles,
    directions,
    local_geometry,
    nearest_in_plane,
    plane_normals,
    shortened,
    without_bridges,
)
from pointup.geometry.neighbors import knn


def geometry_of(pos: Tensor, k: int = 12) -> LocalGeometry:
    ptr = torch.tensor([0, len(pos)])
    return local_geometry(pos, ptr, *knn(pos, ptr, k + 1))


def arches_of(pos: Tensor, k: int = 12) -> tuple[Tensor, Tensor]:
    """Midpoints between points and neighbours, and offsets to their arches, in input units."""
    geometry = geometry_of(pos, k)
    index = geometry.index
    arch = arches(geometry.relative, geometry.normal, geometry.normal[index])
    return (pos[:, None] + pos[index]) / 2, arch * geometry.spacing.unsqueeze(1)


@given(st.lists(st.just(0.0) | st.floats(1e-3, 1.0), min_size=3, max_size=3), st.integers(0, 2**31))
def test_the_normal_is_the_direction_of_least_variance(scales, seed):
    generator = torch.Generator().manual_seed(seed)
    axes = torch.linalg.qr(torch.randn(3, 3, generator=generator))[0]
    points = torch.randn(20, 3, generator=generator) * torch.tensor(scales) @ axes
    centred = points - points.mean(0)
    covariance = centred.T @ centred / 20
    normal = plane_normals(covariance[None])[0]
    values = torch.linalg.eigvalsh(covariance.double())
    size = float(normal.norm())
    assert size == pytest.approx(1.0, abs=1e-5) or size == 0.0
    if size:
        spread = normal.double() @ covariance.double() @ normal.double()
        assert float(spread - values[0]) <= 1e-5 * float(values[2])
    else:
        assert float(values[1] - values[0]) <= 1e-5 * float(values[2])


def test_a_scan_line_with_little_width_still_has_a_normal():
    points = torch.randn(500, 20, 3) * torch.tensor([1.0, 0.01, 0.0])
    centred = points - points.mean(1, keepdim=True)
    normal = plane_normals(centred.mT @ centred / 20)
    assert normal[:, 2].abs().min() > 0.999


def test_points_on_a_line_or_in_one_place_have_no_normal():
    along = torch.linspace(0, 1, 20)[:, None] * torch.tensor([1.0, 2.0, 3.0])
    centred = along - along.mean(0)
    covariances = torch.stack([centred.T @ centred, torch.zeros(3, 3), torch.eye(3)])
    assert torch.equal(plane_normals(covariances), torch.zeros(3, 3))


def test_handwritten_derivatives_equal_finite_differences():
    pos = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    geometry = geometry_of(pos, 4)
    for name in ("relative", "mean", "normal"):
        object.__setattr__(geometry, name, getattr(geometry, name).double())
    children, to_slot = torch.randn(6, 2, 3).double(), torch.randn(6, 2, 3).double()
    normal = geometry.normal[geometry.index]

    def described(from_parent: Tensor) -> Tensor:
        return describe_neighbors_of_children(geometry, from_parent, to_slot, normal)

    assert torch.autograd.gradcheck(described, [children.requires_grad_()])
    # A child in the place of its parent is at the distance 0 from it.
    at_parent = torch.zeros_like(children, requires_grad=True)
    (gradient,) = torch.autograd.grad(described(at_parent).sum(), [at_parent])
    assert gradient.isfinite().all()

    vectors = torch.cat([0.4 * directions(torch.randn(5, 3)), 3 * torch.randn(5, 3)]).double()
    for function in (directions, shortened):
        assert torch.autograd.gradcheck(function, [vectors.requires_grad_()])


def test_on_a_plane_the_offset_to_the_arch_is_zero():
    pos = torch.cat([torch.rand(300, 2), torch.zeros(300, 1)], dim=1)
    pos = pos @ torch.linalg.qr(torch.randn(3, 3))[0]
    assert arches_of(pos)[1].abs().max() < 1e-5


def test_the_arch_over_two_points_of_a_sphere_is_nearly_on_it():
    pos = torch.nn.functional.normalize(torch.randn(4000, 3), dim=1)
    middle, arch = arches_of(pos)
    chord = (middle.norm(dim=-1) - 1).abs().mean()
    assert ((middle + arch).norm(dim=-1) - 1).abs().mean() < 0.2 * chord


def forest(num_points: int = 300, seed: int = 0) -> torch.Tensor:
    """Ground at about 0 and crowns at about 20."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.rand(num_points, 3, generator=generator) * torch.tensor([10.0, 10.0, 1.0])
    points[::2, 2] += 20
    return points


def test_a_column_holds_the_horizontally_nearest_points_at_any_height():
    points = forest()
    found = nearest_in_plane(points, torch.tensor([0, 300]), 13)
    across = torch.cdist(points[:, :2].double(), points[:, :2].double())
    expected = across.argsort(dim=1)[:, :13]
    assert torch.equal(found.sort(1).values, expected.sort(1).values)
    columns = columns_of(points, found, stride=4)
    assert torch.equal(columns.index, found[:, ::4])
    assert torch.equal(columns.index[:, 0], torch.arange(300))
    torch.testing.assert_close(columns.relative, points[columns.index] - points[:, None])


def test_the_profile_has_the_heights_of_ground_and_crown_over_each_point():
    points = forest()
    found = nearest_in_plane(points, torch.tensor([0, 300]), 40)
    profile = columns_of(points, found, stride=4).profile
    heights = points[:, 2][found] - points[:, 2:]
    for share, quantile in zip(QUANTILES, profile.unbind(1), strict=True):
        at = round(share * 39)
        torch.testing.assert_close(quantile, heights.sort(1).values[:, at])
    in_crown = points[:, 2] > 15
    assert (profile[in_crown, 0] < -18).all() and (profile[~in_crown, -1] > 18).all()


def test_small_clouds_have_columns_of_the_points_that_there_are():
    points = forest(5)
    found = nearest_in_plane(points, torch.tensor([0, 5]), 13)
    columns = columns_of(points, found, stride=4)
    assert columns.missing.tolist() == [[False, False, True, True]] * 5
    assert torch.equal(columns.index[:, 2], torch.arange(5))
    heights = points[:, 2] - points[:, 2:]
    torch.testing.assert_close(columns.profile[:, 0], heights.amin(1))
    torch.testing.assert_close(columns.profile[:, -1], heights.amax(1))


def test_descriptions_do_not_change_with_origin_or_unit():
    points = forest()
    ptr, spacing = torch.tensor([0, 300]), torch.full((300, 1), 0.5)

    def described(points: torch.Tensor, spacing: torch.Tensor) -> list[torch.Tensor]:
        columns = columns_of(points, nearest_in_plane(points, ptr, 29), stride=4)
        return [describe_columns(columns, spacing), describe_profiles(columns, spacing)]

    one = described(points, spacing)
    assert one[0].shape == (300, 8, NUM_FEATURES) and one[1].shape == (300, len(QUANTILES))
    for before, after in zip(one, described(points * 4 + 16, spacing * 4), strict=True):
        torch.testing.assert_close(before, after, atol=2e-4, rtol=2e-4)


def geometry_at(points: np.ndarray, k: int = 12) -> LocalGeometry:
    return geometry_of(torch.from_numpy(points).float(), k)


@pytest.mark.parametrize("gap", [8.0, 40.0, 4e5])
def test_one_far_neighbour_does_not_move_the_spacing(gap):
    rng = np.random.default_rng(0)
    cluster = rng.random((12, 3))
    alone = geometry_at(cluster, k=11)
    both = geometry_at(np.concatenate([cluster, [[gap, 0.5, 0.5]]]), k=12)
    assert torch.allclose(both.spacing[:12], alone.spacing)
    assert both.missing[:12].sum(1).eq(1).all()


@pytest.mark.parametrize("gap", [2.0, 3.0, 5.0])
def test_a_neighbour_that_is_a_little_far_hardly_moves_it(gap):
    rng = np.random.default_rng(0)
    cluster = rng.random((12, 3))
    alone = geometry_at(cluster, k=11).spacing
    both = geometry_at(np.concatenate([cluster, [[gap, 0.5, 0.5]]]), k=12).spacing[:12]
    assert (both / alone).max() < 1.15


def test_neighbourhoods_without_a_gap_are_whole():
    rng = np.random.default_rng(0)
    plane = rng.random((3000, 3)) * [1, 1, 0]
    line = np.linspace(0, 1, 500)[:, None] * [1, 2, 3]
    grid = np.stack(np.meshgrid(*[np.arange(8.0)] * 3), axis=-1).reshape(-1, 3)
    # Two returns of one pulse nearly coincide.
    pairs = np.repeat(plane[:500], 2, axis=0) + 1e-4 * rng.random((1000, 3))
    for points, most in ((plane, 3e-3), (line, 0.0), (grid, 0.0), (pairs, 0.02)):
        assert geometry_at(points).missing.any(1).float().mean() <= most


def test_a_bridge_is_long_against_the_spacing_on_both_sides():
    rng = np.random.default_rng(0)
    dense, sparse = rng.random((200, 3)) * [1, 1, 0], 10 * rng.random((200, 3)) * [1, 1, 0]
    points = np.concatenate([dense, sparse + np.array([1.2, 0, 0])])
    pos = torch.from_numpy(points).float()
    geometry = geometry_at(points)
    distance = np.linalg.norm(points[:, None] - points, axis=2)
    index = torch.arange(400).expand(400, 400)
    kept = without_bridges(index, slice(0, 400), pos, geometry.local_spacing) >= 0
    spacing = geometry.local_spacing[:, 0].numpy()
    expected = distance <= BRIDGE * np.maximum(spacing[:, None], spacing)
    assert (kept.numpy() == expected).mean() > 0.9999
    assert 0.01 < expected.mean() < 0.9


def test_cutting_starts_at_the_first_gap():
    points = np.array([[0, 0, 0], [1, 0, 0], [1.5, 0, 0], [2, 0, 0], [2 * GAP + 0.1, 0, 0.0]])
    geometry = geometry_at(points, k=4)
    assert geometry.missing.tolist()[0] == [False, False, False, False, True]
    assert geometry.spacing[0] == pytest.approx(1.5)
