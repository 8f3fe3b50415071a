"""Neighbourhoods: fitted planes, and ways to the surface that they suggest."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pointup.geometry.local import LocalGeometry, arches, local_geometry, plane_normals
from pointup.geometry.neighbors import knn


def geometry_of(pos: Tensor, k: int = 12) -> LocalGeometry:
    ptr = torch.tensor([0, len(pos)])
    return local_geometry(pos, ptr, *knn(pos, ptr, k + 1))


def arches_of(pos: Tensor, k: int = 12) -> tuple[Tensor, Tensor]:
    """Midpoints between points and neighbours, and the ways to their arches, in input units."""
    geometry = geometry_of(pos, k)
    index = geometry.index
    arch = arches(geometry.relative, geometry.normal, geometry.normal[index])
    return (pos[:, None] + pos[index]) / 2, arch * geometry.spacing.unsqueeze(1)


@given(st.lists(st.just(0.0) | st.floats(1e-3, 1.0), min_size=3, max_size=3), st.integers(0, 2**31))
def test_the_normal_is_the_direction_in_which_points_spread_least(
    scales: list[float], seed: int
) -> None:
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


def test_a_scan_line_with_little_width_still_has_a_normal() -> None:
    points = torch.randn(500, 20, 3) * torch.tensor([1.0, 0.01, 0.0])
    centred = points - points.mean(1, keepdim=True)
    normal = plane_normals(centred.mT @ centred / 20)
    assert normal[:, 2].abs().min() > 0.999


def test_points_on_a_line_or_in_one_place_have_no_normal() -> None:
    along = torch.linspace(0, 1, 20)[:, None] * torch.tensor([1.0, 2.0, 3.0])
    centred = along - along.mean(0)
    covariances = torch.stack([centred.T @ centred, torch.zeros(3, 3), torch.eye(3)])
    assert torch.equal(plane_normals(covariances), torch.zeros(3, 3))


def test_on_a_plane_there_is_no_way_to_go() -> None:
    pos = torch.cat([torch.rand(300, 2), torch.zeros(300, 1)], dim=1)
    pos = pos @ torch.linalg.qr(torch.randn(3, 3))[0]
    assert arches_of(pos)[1].abs().max() < 1e-5


def test_the_arch_over_two_points_of_a_sphere_is_nearly_on_it() -> None:
    pos = torch.nn.functional.normalize(torch.randn(4000, 3), dim=1)
    middle, arch = arches_of(pos)
    chord = (middle.norm(dim=-1) - 1).abs().mean()
    assert ((middle + arch).norm(dim=-1) - 1).abs().mean() < 0.2 * chord
