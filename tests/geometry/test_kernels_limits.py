"""Kernels at their limits: many neighbours, any extent, options of the launch, radii with ties."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from test_kernels import (
    DEVICE,
    IS_INTERPRETED,
    expect_knn,
    long,
    needs_device,
    needs_triton,
    ragged,
)
from test_kernels_trial import KERNEL_FILES
from test_kernels_trial import as_on_cuda as as_on_cuda
from test_kernels_trial import tried_anew as tried_anew

from pointup.geometry import kernels, neighbors
from pointup.geometry.neighbors import knn
from pointup.geometry.packed import batch_from_ptr

pytestmark = needs_triton


@needs_device
@long
def test_the_points_of_very_many_clouds_stay_with_their_cloud() -> None:
    from pointup.geometry.kernels.knn import along_curve

    num_clouds = 70_000  # More than 16 bits can count.
    axes = torch.rand(3, 2 * num_clouds, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    pairs = axes.view(3, num_clouds, 2)
    boxes = torch.cat([pairs.amin(2), pairs.amax(2)]).T.contiguous()
    ptr = torch.arange(0, 2 * num_clouds + 1, 2, device=DEVICE)
    curve = along_curve(axes, ptr, boxes)
    assert torch.equal(curve.order // 2, torch.arange(2 * num_clouds, device=DEVICE) // 2)
    assert (curve.code.diff() >= 0).all() and curve.code[0] >= 0


@needs_device
@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("k", [33, pytest.param(70, marks=long)])
def test_more_than_32_neighbours_are_those_of_brute_force(k: int) -> None:
    sets = ragged([(4, 90), (1, 3), (2, 40)])
    with mock.patch.object(kernels, "is_available", return_value=True):
        expect_knn(sets, k, *knn(*sets[2:], k, *sets[:2]))


def recorded_options(pos: torch.Tensor, ptr: torch.Tensor) -> dict[str, Any]:
    from pointup.geometry.kernels import nearest as module

    kernel = mock.MagicMock()
    with mock.patch.object(module, "nearest_kernel", kernel):
        module.nearest_index(pos, ptr, pos, ptr)
    options: dict[str, Any] = kernel.__getitem__.return_value.call_args.kwargs
    return options


def test_registers_are_limited_for_float32_on_nvidia_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pos, ptr = torch.zeros(3, 3), torch.tensor([0, 3])
    assert recorded_options(pos, ptr)["maxnreg"] == 168
    assert "maxnreg" not in recorded_options(pos.double(), ptr)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "maxnreg" not in recorded_options(pos, ptr)


@pytest.mark.skipif(IS_INTERPRETED, reason="nothing is compiled there")
def test_no_kernel_is_recompiled_for_other_counts() -> None:
    import importlib

    from triton.runtime.jit import JITFunction

    counts = []
    for name in KERNEL_FILES:
        module = importlib.import_module(f"pointup.geometry.kernels.{name}")
        for kernel in vars(module).values():
            if isinstance(kernel, JITFunction) and kernel.__name__.endswith("_kernel"):
                for param in kernel.params:
                    if param.name.startswith("num_") or param.name == "k":
                        counts.append(param.name)
                        assert param.do_not_specialize, f"{kernel.__name__}: {param.name}"
    assert len(counts) == 13 and counts.count("k") == 1


EXTENTS = [1e-37, *(pytest.param(e, marks=long) for e in (1e-34, 1e-30, 1e-15, 1e15)), 1e30]


@needs_device
@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("extent", EXTENTS)
def test_clouds_of_any_extent_have_the_neighbours_of_brute_force(extent: float) -> None:
    from pointup.geometry.kernels.knn import along_curve, cloud_boxes

    pos, ptr, other, other_ptr = ragged([(40, 20), (0, 0), (50, 30)])
    pos, other = pos * extent, other * extent
    curve = along_curve(pos.T.contiguous(), ptr, cloud_boxes(pos.T.contiguous(), ptr))
    # The code of a point contains the number of its cloud.
    assert torch.equal(curve.code >> 48, batch_from_ptr(ptr))
    with mock.patch.object(kernels, "is_available", return_value=True):
        squared, index = knn(pos, ptr, 4, other, other_ptr)
    expected, _ = neighbors._search_chunks(other, other_ptr, pos, ptr, 4)
    # Squares in float32 underflow below 1e-38 and overflow above 1e38.
    torch.testing.assert_close(squared, expected, rtol=1e-5, atol=1e-38)
    found = index >= 0
    assert torch.equal(found, squared < torch.inf)
    cloud = batch_from_ptr(other_ptr)[:, None].expand(-1, 4)[found]
    assert torch.equal(batch_from_ptr(ptr)[index[found]], cloud)


@needs_device
def test_radii_of_the_kernel_equal_those_of_torch() -> None:
    from pointup.geometry import thinning as insertion
    from pointup.geometry.kernels.insertion import settle

    settled, plain = [], insertion.settle

    def both(
        neighbor: torch.Tensor, squared: torch.Tensor, parent: torch.Tensor, limit: torch.Tensor
    ) -> torch.Tensor:
        settled.append(plain(neighbor, squared, parent, limit))
        settled.append(settle(neighbor, squared, parent.int(), limit, num_levels=2))
        return settled[-1]

    # Duplicates, ties on a grid, an empty cloud and one of a single point.
    pos, ptr, _, _ = ragged([(40, 0), (0, 0), (1, 0), (27, 0)])
    pos[5:20] = pos[3]
    pos[41:] = torch.cartesian_prod(*[torch.arange(3.0, device=DEVICE)] * 3)
    with (
        mock.patch.object(insertion, "settle", both),
        mock.patch.object(kernels, "take", return_value=False),
    ):
        insertion.insertion_radii(pos, ptr, torch.tensor([12, 0, 1, 6]))
    assert torch.equal(*settled)
