"""The reduction of a step: gradients, totals and timings of all processes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from runs import SMALL, options, training
from torch import Tensor
from torch_geometric.data import Batch, Data

from pointup.benchmark.training_step import OneProcessGroup
from pointup.datasets.batch import collate, make_loader
from pointup.datasets.opening import open_samples
from pointup.datasets.pair_dataset import PairDataset
from pointup.model.upsampler import Upsampler
from pointup.training.distributed.reduction import StepReduction
from pointup.training.step_totals import StepMeter, StepTotals

ALONE: Any = OneProcessGroup(torch.device("cpu"))


def cloud(name: str = "cloud", size: int = 5) -> Data:
    points = torch.rand(size, 3)
    return Data(pos=points, target=points, name=name, index=0)


class SlowPairs(torch.utils.data.Dataset[Data]):
    """Pairs that take long to read, by their recorded time and by the clock."""

    def __getitem__(self, index: int) -> Data:
        time.sleep(0.05)
        pair = cloud(str(index))
        pair.seconds = {"reading": 0.05, "augmenting": 0.01}
        return pair

    def __len__(self) -> int:
        return 4


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_step_that_waits_for_data_reports_the_stage(num_workers):
    loader = make_loader(SlowPairs(), [[0, 1], [2, 3]], num_workers)  # type: ignore[arg-type]
    step, reduction = StepMeter(ALONE), StepReduction(ALONE, [])
    batch = step.next_of(iter(loader))
    step.busy_seconds = 0.1
    reduction.add(torch.ones(2))
    step.add(batch, torch.ones(2), torch.zeros(2), reduction.sums)
    totals = step.totals(reduction.reduce(step.numbers(stop=False, elapsed_seconds=0.0)))
    assert (totals.num_clouds, totals.num_tokens, totals.loss) == (2, 20, 1.0)
    assert totals.data_seconds["reading"] == pytest.approx(0.1)
    assert totals.data_seconds["augmenting"] == pytest.approx(0.02)
    assert totals.data_seconds["packing"] > 0
    assert totals.limited_by == "reading" and totals.out_of_memory == 0


@pytest.mark.parametrize(
    ("busy", "waits", "limit"),
    [
        ((1.0, 1.0), (0.01, 0.0), "training"),
        ((1.0, 0.9), (0.0, 0.0), "other processes"),
        ((1.0, 0.9), (0.0, 0.1), "augmenting"),
    ],
)
def test_a_step_reports_what_limits_it(busy, waits, limit):
    totals = StepTotals(
        num_clouds=1, num_tokens=1, loss=0.0, stop=False, elapsed_seconds=0.0, busy_seconds=busy,
        data_wait_seconds=waits, out_of_memory=0, data_seconds={"reading": 1.0, "augmenting": 2.0},
    )  # fmt: skip
    assert totals.limited_by == limit


def test_losses_and_clouds_are_counted_for_each_dataset():
    step, reduction = StepMeter(ALONE, num_datasets=3), StepReduction(ALONE, [])
    for losses, datasets in (([1.0, 2.0, math.nan], [0, 2, 1]), ([4.0], [0]), ([], [])):
        reduction.add(torch.tensor(losses))
        batch = collate([cloud() for _ in losses])
        step.add(batch, torch.tensor(losses), torch.tensor(datasets), reduction.sums)
    totals = step.totals(reduction.reduce(step.numbers(stop=False, elapsed_seconds=0.0)))
    assert totals.clouds_by_dataset == (2, 1, 1)
    assert totals.loss_by_dataset[::2] == (2.5, 2.0) and math.isnan(totals.loss_by_dataset[1])


def test_gradients_are_summed_in_double_precision_so_that_their_order_does_not_show():
    weight = torch.nn.Parameter(torch.zeros(1))
    sums = []
    for order in ((1e8, 1.0, -1e8, 1.0), (1.0, 1.0, 1e8, -1e8), (-1e8, 1.0, 1.0, 1e8)):
        reduction = StepReduction(ALONE, [weight])
        for gradient in order:
            weight.grad = torch.tensor([gradient])
            reduction.add(torch.tensor([gradient]))
        loss, _ = reduction.reduce(torch.tensor([4.0]))
        sums.append((weight.grad.item(), loss))
    # In single precision the four clouds sum to 0.25, 0 or 0.5, depending on their order.
    assert sums == [(0.5, 2.0)] * 3


@pytest.mark.parametrize("num_clouds", [1, 3, 100, 5000])
def test_fp16_gradients_of_many_clouds_do_not_overflow(num_clouds):
    def gradient(scaler: object, dtype: torch.dtype) -> float:
        accelerator: Any = SimpleNamespace(
            device=torch.device("cpu"), scaler=scaler, reduce=lambda buffer, reduction: buffer
        )
        weight = torch.nn.Parameter(torch.zeros(1))
        reduction = StepReduction(accelerator, [weight])
        scale = 2.0**14
        # The gradient of each cloud is 0.25.
        losses = (weight.to(dtype) * torch.full((num_clouds,), 0.25, dtype=dtype)).float()
        (scale * reduction.total_of(losses)).backward()
        reduction.add(losses)
        reduction.reduce(torch.tensor([float(num_clouds)]))
        assert weight.grad is not None
        return weight.grad.item() / scale

    assert gradient(object(), torch.float16) == pytest.approx(0.25, rel=2e-3)
    assert gradient(None, torch.float32) == 0.25


@pytest.mark.parametrize("requested", [(), (0,), (2,), (0, 1, 2)])
def test_a_stop_requested_on_one_process_stops_all(requested):
    buffers = []

    def reduced(rank: int, reduce: Callable[[Tensor], Tensor]) -> StepTotals:
        processes: Any = SimpleNamespace(
            device=torch.device("cpu"), num_processes=3, process_index=rank,
            scaler=None, reduce=lambda buffer, reduction: reduce(buffer),
        )  # fmt: skip
        step, reduction = StepMeter(processes), StepReduction(processes, [])
        step.busy_seconds = rank + 1.0
        step.add(collate([]), torch.zeros(0), torch.zeros(0), reduction.sums)
        numbers = step.numbers(rank in requested, elapsed_seconds=float(rank == 0))
        return step.totals(reduction.reduce(numbers))

    for rank in range(3):
        reduced(rank, lambda buffer: buffers.append(buffer) or buffer)  # type: ignore[func-returns-value]
    totals = reduced(0, lambda buffer: torch.stack(buffers).sum(0))
    assert totals.stop == bool(requested) and totals.elapsed_seconds == 1.0
    assert totals.busy_seconds == (1.0, 2.0, 3.0) and totals.idle_fraction == pytest.approx(1 / 3)


def batch_of(directory: Path, *indices: int) -> Batch:
    dataset = PairDataset(open_samples(directory, "train"))
    return collate([dataset[(0, index)] for index in indices])


def test_the_gradient_does_not_depend_on_how_clouds_are_packed(pair_directory, tmp_path):
    config = options(pair_directory, tmp_path)
    torch.manual_seed(0)
    model = Upsampler(**SMALL.__dict__)
    torch.nn.init.normal_(model.pull.weight, std=0.1)
    gradients, losses_of_step = [], []
    for packing in ([(0, 1, 2, 3, 4, 5)], [(0,), (1, 2), (), (3, 4, 5)], [(5, 3), (4,), (0, 1, 2)]):
        model.zero_grad()
        reduction = StepReduction(ALONE, model.parameters())
        for indices in packing:
            losses = training.losses_of_model(
                model, batch_of(pair_directory, *indices), None, config.max_ratio, config.loss
            )
            assert len(losses) == len(indices)
            reduction.total_of(losses).backward()
            reduction.add(losses)
        losses_of_step.append(reduction.reduce(torch.tensor([6.0]))[0])
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    for gradient, loss in zip(gradients[1:], losses_of_step[1:], strict=True):
        torch.testing.assert_close(gradient, gradients[0], rtol=1e-3, atol=1e-4)
        assert loss == pytest.approx(losses_of_step[0], rel=1e-5)


def test_a_micro_batch_without_clouds_adds_nothing(pair_directory, tmp_path):
    model, config = Upsampler(**SMALL.__dict__), options(pair_directory, tmp_path)
    reduction = StepReduction(ALONE, model.parameters())
    losses = training.losses_of_model(
        model, batch_of(pair_directory), None, config.max_ratio, config.loss
    )
    reduction.total_of(losses).backward()
    reduction.add(losses)
    assert reduction.reduce(torch.zeros(1)) == [0.0, 0.0]
    assert all(not p.grad.any() for p in model.parameters())
