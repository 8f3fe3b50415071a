"""Columns: what lies above and below a point."""

from __future__ import annotations

import torch

from pointup.geometry.local_geometry import (
    NUM_FEATURES,
    QUANTILES,
    columns_of,
    describe_columns,
    describe_profiles,
    nearest_in_plane,
)


def forest(num_points: int = 300, seed: int = 0) -> torch.Tensor:
    """Ground at about 0 and crowns at about 20."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.rand(num_points, 3, generator=generator) * torch.tensor([10.0, 10.0, 1.0])
    points[::2, 2] += 20
    return points


def test_a_column_holds_the_horizontally_nearest_points_at_any_height() -> None:
    points = forest()
    found = nearest_in_plane(points, torch.tensor([0, 300]), 13)
    across = torch.cdist(points[:, :2].double(), points[:, :2].double())
    expected = across.argsort(dim=1)[:, :13]
    assert torch.equal(found.sort(1).values, expected.sort(1).values)
    columns = columns_of(points, found, stride=4)
    assert torch.equal(columns.index, found[:, ::4])
    assert torch.equal(columns.index[:, 0], torch.arange(300))
    torch.testing.assert_close(columns.relative, points[columns.index] - points[:, None])


def test_the_profile_has_the_heights_of_ground_and_crown_over_each_point() -> None:
    points = forest()
    found = nearest_in_plane(points, torch.tensor([0, 300]), 40)
    profile = columns_of(points, found, stride=4).profile
    heights = points[:, 2][found] - points[:, 2:]
    for share, quantile in zip(QUANTILES, profile.unbind(1), strict=True):
        at = round(share * 39)
        torch.testing.assert_close(quantile, heights.sort(1).values[:, at])
    in_crown = points[:, 2] > 15
    assert (profile[in_crown, 0] < -18).all() and (profile[~in_crown, -1] > 18).all()


def test_small_clouds_have_columns_of_the_points_that_there_are() -> None:
    points = forest(5)
    found = nearest_in_plane(points, torch.tensor([0, 5]), 13)
    columns = columns_of(points, found, stride=4)
    assert columns.missing.tolist() == [[False, False, True, True]] * 5
    assert torch.equal(columns.index[:, 2], torch.arange(5))
    heights = points[:, 2] - points[:, 2:]
    torch.testing.assert_close(columns.profile[:, 0], heights.amin(1))
    torch.testing.assert_close(columns.profile[:, -1], heights.amax(1))


def test_descriptions_do_not_change_with_origin_or_unit() -> None:
    points = forest()
    ptr, spacing = torch.tensor([0, 300]), torch.full((300, 1), 0.5)

    def described(points: torch.Tensor, spacing: torch.Tensor) -> list[torch.Tensor]:
        columns = columns_of(points, nearest_in_plane(points, ptr, 29), stride=4)
        return [describe_columns(columns, spacing), describe_profiles(columns, spacing)]

    one = described(points, spacing)
    assert one[0].shape == (300, 8, NUM_FEATURES) and one[1].shape == (300, len(QUANTILES))
    for before, after in zip(one, described(points * 4 + 16, spacing * 4), strict=True):
        torch.testing.assert_close(before, after, atol=2e-4, rtol=2e-4)
