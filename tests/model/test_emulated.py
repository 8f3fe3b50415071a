"""GPU behaviour tested without a GPU: places of values, waits for the device, gradients.

The tests run in a separate process, which tests/geometry/test_kernels.py starts, because torch
registers the emulated device as an accelerator.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import wavy_pair
from forest_options import FOREST
from sheets import sheet, upsample_in_blocks
from test_model import as_if_trained
from torch import Tensor
from torch_geometric.data import Batch

from pointup import upsample
from pointup.datasets.batch import collate, move
from pointup.datasets.opening import open_samples
from pointup.datasets.pair_dataset import PairDataset
from pointup.datasets.pair_writer import write_pairs
from pointup.evaluation.cloud_metrics import clouds_of_pairs, measure_clouds
from pointup.geometry import neighbors
from pointup.geometry.packed import assume_valid, on_host, to_device
from pointup.model.upsampler import Upsampler
from pointup.training.objective import LossConfig, cloud_losses, target_spacing, training_ratio
from pointup.upsampling.in_memory import load_model
from pointup.upsampling.options import UpsampleOptions
from pointup.upsampling.single_pass import selection, upsampling_pass

pytest.importorskip("triton", reason="the kernels' wrappers need triton")
IS_EMULATED = os.environ.get("POINTUP_TESTS_EMULATED") == "1"
CPU = torch.device("cpu")
if IS_EMULATED:
    from emulated_device import DEVICE, emulated, like_mps, operations, recorded_waits

slow = pytest.mark.slow
needs_device = pytest.mark.skipif(not IS_EMULATED, reason="runs in a separate process")


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    if IS_EMULATED:
        with emulated():
            yield
    else:
        yield


def batch_of(directory: Path, sizes: list[int], normals: bool = True) -> Batch:
    rng = np.random.default_rng(0)
    pairs = [wavy_pair(f"{n}", size, 2 + 1.3 * (n % 4), rng) for n, size in enumerate(sizes)]
    pairs = pairs if normals else [replace(pair, target_normals=None) for pair in pairs]
    write_pairs(pairs, pairs[:1], directory / "pairs", info={})
    dataset = PairDataset(open_samples(directory / "pairs", "train"))
    return collate([dataset[number] for number in range(len(sizes))])


def step(
    model: Upsampler, batch: Batch, device: torch.device, ratio: float | None, loss: LossConfig
) -> tuple[Tensor, list[Tensor]]:
    """Losses and gradients of a step without input checks, as in train.py."""
    batch = move(batch, device)
    with assume_valid():
        ratios = training_ratio(batch, ratio, 16.0)
        output = model(batch.pos, batch.ptr, ratios)
        spacing = target_spacing(output.gaps, batch.ptr, ratios)
        losses = cloud_losses(output, batch, spacing, loss)
        losses.mean().backward()
    assert losses.device == output.pos.device == device
    return losses.detach(), [
        weight.grad for weight in model.parameters() if weight.grad is not None
    ]


@needs_device
@pytest.mark.parametrize(
    ("options", "loss", "recompute", "ratio", "normals"),
    [
        ({}, LossConfig(repulsion=0.1, coverage=0.1, outliers=0.1), True, None, True),
        pytest.param(
            {}, LossConfig(chamfer="density-aware", trim=0.1), False, 2.5, True, marks=slow
        ),
        pytest.param(
            {},
            LossConfig(chamfer="squared", density=0.0, output_to_plane=0.3),
            None,
            None,
            False,
            marks=slow,
        ),
        (FOREST | {"reach": 4.0}, LossConfig(unit="cloud", error=0.2), None, None, True),
    ],
)
def test_a_step_never_waits_and_has_the_losses_and_gradients_of_the_cpu(
    options, loss, recompute, ratio, normals, tmp_path
):
    batch = batch_of(tmp_path, [60, 35, 90, 8], normals)
    model, there = as_if_trained(**options), as_if_trained(**options).to(DEVICE)
    model.recompute = there.recompute = recompute
    expected, expected_grads = step(model, batch, CPU, ratio, loss)
    with recorded_waits([]) as waits:
        found, grads = step(there, batch, DEVICE, ratio, loss)
    assert waits == []
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)
    for grad, want in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad.cpu(), want, rtol=2e-3, atol=2e-4)


@needs_device
@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("lidar", 1110),
        pytest.param("shapes", 1580, marks=slow),
        pytest.param("noisy", 1580, marks=slow),
        ("forest", 1300),
    ],
)
def test_a_step_of_an_included_model_has_no_more_operations(name, most, tmp_path):
    """Small batches take a GPU 5 us an operation; 2 % are left for other versions of torch."""
    model = load_model(name, CPU).train().requires_grad_(True).to(DEVICE)
    batch = batch_of(tmp_path, [60, 35, 90, 80])
    operations.clear()
    step(model, batch, DEVICE, None, LossConfig(error=0.2 * model.config.chooses_by_error))
    assert 0.8 * most < len(operations) <= most


@needs_device
def test_without_float64_a_step_has_the_losses_of_the_cpu_and_pairs_are_measured(tmp_path):
    batch, loss = batch_of(tmp_path, [40, 25]), LossConfig()
    expected = step(as_if_trained(), batch, CPU, None, loss)[0]
    model = as_if_trained().to(DEVICE)
    with like_mps(), recorded_waits([]) as waits:
        found = step(model, batch, DEVICE, None, loss)[0]
        assert waits and all(wait.startswith("blocking copy") for wait in waits)
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)
        there = move(batch, DEVICE)
        with torch.no_grad():
            assert (
                len(
                    measure_clouds(there, clouds_of_pairs(there, training_ratio(there, None, 16.0)))
                )
                == 2
            )


@needs_device
@slow
def test_a_cloud_is_upsampled_as_on_the_cpu():
    rng = np.random.default_rng(0)
    points = np.column_stack([rng.random((600, 2)), np.zeros(600)]) + np.array([5e5, 4e6, 0])
    expected = upsample(points, 3.0, model=as_if_trained(), device="cpu")
    made = upsample(points, 3.0, model=as_if_trained().to(DEVICE), device=DEVICE)
    assert len(made) == len(expected) == 1800
    # Rounding may decide which of two equally good children is kept.
    assert np.isclose(made, expected, rtol=0, atol=1e-3).all(1).mean() > 0.9


@needs_device
def test_a_survey_of_many_blocks_is_upsampled_on_the_device_as_on_the_cpu(make_store, monkeypatch):
    model, options = as_if_trained(), UpsampleOptions(ratio=3.0)

    def upsampled(device: torch.device, tile: float | None = None) -> np.ndarray:
        store = make_store(sheet(160), block_size=60)
        return upsample_in_blocks(store, model.to(device), options, tile, 200, device)

    def refuse(*arguments: Any) -> None:
        raise AssertionError("a stage of the device ran on the host")

    expected = upsampled(CPU)
    monkeypatch.setattr(upsampling_pass, "relax", refuse)
    monkeypatch.setattr(selection, "_pairs_in_trees", refuse)
    monkeypatch.setattr(neighbors.DeviceTree, "_on_host", property(refuse))
    made = upsampled(DEVICE)
    assert len(made) == len(expected) == 320
    assert (np.linalg.norm(made - expected, axis=1) < 1e-3).mean() > 0.99
    # MKL's products, here those of the network, depend on the place of a row.
    np.testing.assert_allclose(upsampled(DEVICE, tile=8.0), made, rtol=0, atol=1e-6)


@needs_device
def test_a_model_is_made_on_the_default_device():
    torch.manual_seed(12345)  # No other test has calibrated a model with these weights.
    with DEVICE:
        model = Upsampler(feature_dim=16, k=5)
    assert {weight.device for weight in model.parameters()} == {DEVICE}
    pos, ptr = torch.rand(30, 3), torch.tensor([0, 30])
    made = model(pos.to(DEVICE), to_device(ptr, DEVICE), 2.0).pos
    assert made.device == DEVICE and torch.isfinite(made.detach().cpu()).all()


@needs_device
def test_what_the_host_knew_it_still_knows_on_the_device():
    ptr = torch.tensor([0, 3, 8])
    with recorded_waits([]) as waits:
        moved = to_device(ptr, DEVICE)
        assert moved.device == DEVICE and torch.equal(on_host(moved), ptr)
        assert waits == []
        assert torch.equal(on_host(moved + 1), ptr + 1)
        (wait,) = waits
        assert wait.startswith("copy to the CPU in pointup/geometry/packed.py")
