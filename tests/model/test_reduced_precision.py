"""Coordinates keep the precision of float32 where matrix products of float32 are rounded.

torch rounds them to TF32 on NVIDIA GPUs where the user or the environment allows it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_model import as_if_trained
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pointup.geometry.local_geometry import LocalGeometry, describe_neighbors, local_geometry
from pointup.geometry.neighbors import knn
from pointup.model.offsets import mean_offset
from pointup.model.upsampler import Upsampler

FACTORS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2), "baddbmm_": (1, 2)}
"""The arguments of each matrix product that are rounded."""
NORMAL = torch.nn.functional.normalize(torch.tensor([0.3, -0.5, 0.8]), dim=0)


def to_tf32(values: Any) -> Any:
    """Float32 values rounded to 10 bits, as the factors of a product in TF32."""
    if not isinstance(values, Tensor) or values.dtype != torch.float32:
        return values
    bits = values.contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


class TensorFloat32(TorchDispatchMode):
    """In this context matrix products round their factors to TF32."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        rounded = FACTORS.get(func.overloadpacket.__name__, ())
        args = tuple(to_tf32(v) if place in rounded else v for place, v in enumerate(args))
        return func(*args, **(kwargs or {}))


def points_on_plane(num_points: int = 600) -> Tensor:
    points = torch.rand(num_points, 3, generator=torch.Generator().manual_seed(0))
    return points - (points @ NORMAL)[:, None] * NORMAL


def geometry_of(pos: Tensor) -> LocalGeometry:
    ptr = torch.tensor([0, len(pos)])
    return local_geometry(pos, ptr, *knn(pos, ptr, 13))


def test_the_emulated_products_are_rounded():
    values = torch.randn(50, 50)
    with TensorFloat32():
        rounded = values @ values
    assert 1e-4 < (rounded - values @ values).abs().max() < 0.1


def test_neighbourhoods_and_their_description_are_not_rounded():
    pos = torch.rand(500, 3, generator=torch.Generator().manual_seed(0))

    def described() -> list[Tensor]:
        geometry = geometry_of(pos)
        index = geometry.index
        description = describe_neighbors(
            geometry, geometry.relative, geometry.spacing[index], geometry.normal[index]
        )
        return [geometry.covariance, geometry.normal, geometry.mean, description]

    expected = described()
    with TensorFloat32():
        found = described()
    assert all(torch.equal(*both) for both in zip(found, expected, strict=True))


def test_turned_normals_are_not_rounded():
    geometry = geometry_of(torch.rand(200, 3, generator=torch.Generator().manual_seed(0)))
    model = as_if_trained(num_refinements=2)
    # Features and weights that TF32 holds exactly.
    features, g = torch.zeros(200, 16), to_tf32(torch.rand(200, 13, model.config.position_hidden))
    torch.nn.init.zeros_(model.normal.weight)
    torch.nn.init.constant_(model.normal.bias, 0.125)
    with torch.no_grad():
        expected = model.turn_normals(features, g, geometry)
        with TensorFloat32():
            found = model.turn_normals(features, g, geometry)
    torch.testing.assert_close(found, expected, rtol=0, atol=3e-6)
    assert (expected - geometry.normal).abs().max() > 0.1, "not turned"


def test_offsets_and_their_gradients_are_not_rounded():
    weights, relative = torch.randn(2, 40, 6, 13), torch.randn(40, 13, 3)
    from_parent, normal = torch.randn(40, 6, 3), torch.randn(40, 13, 3)
    towards = torch.randn(40, 6, 3)

    def moved() -> list[Tensor]:
        leaves = [values.clone().requires_grad_() for values in (weights, from_parent, normal)]
        offset = mean_offset(leaves[0], relative, *leaves[1:])
        offset.backward(towards)
        return [offset.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    expected = moved()
    with TensorFloat32():
        found = moved()
    assert len(found) == 4
    assert all(torch.equal(*both) for both in zip(found, expected, strict=True))


def test_offsets_and_their_gradients_are_those_of_the_formula():
    weights, relative = torch.randn(2, 9, 4, 5), torch.randn(9, 5, 3)
    from_parent, normal = torch.randn(9, 4, 3), torch.randn(9, 5, 3)
    towards = torch.randn(9, 4, 3)

    def by_formula(
        weights: Tensor, relative: Tensor, from_parent: Tensor, normal: Tensor
    ) -> Tensor:
        to_neighbor = relative[:, None] - from_parent[:, :, None]
        height = (to_neighbor * normal[:, None]).sum(-1, keepdim=True)
        to_points, to_planes = weights.unsqueeze(-1)
        return (to_points * to_neighbor + to_planes * height * normal[:, None]).mean(2)

    results = []
    for function in (mean_offset, by_formula):
        leaves = [values.clone().requires_grad_() for values in (weights, from_parent, normal)]
        offset = function(leaves[0], relative, *leaves[1:])
        offset.backward(towards)
        results.append([offset, *(leaf.grad for leaf in leaves)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_children_of_points_on_a_plane_stay_on_it(training):
    pos = points_on_plane()
    model = as_if_trained(num_refinements=2).train(training)
    with TensorFloat32(), torch.set_grad_enabled(training):
        output = model(pos, torch.tensor([0, len(pos)]), 4.0)
    spacing = output.gaps.mean()
    assert (output.candidates.detach() @ NORMAL).abs().max() < 1e-4 * spacing
    start = Upsampler(feature_dim=16, num_layers=1)(pos, torch.tensor([0, len(pos)]), 4.0)
    assert (output.candidates - start.candidates).abs().max() > 0.05 * spacing, "no offsets"
