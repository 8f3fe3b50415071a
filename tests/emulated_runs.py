"""Whole runs on a device without hardware: train.py, retries, budgets, upsampling, the bench.

See `emulated_device`. Run by `test_emulated.py`, in a process of its own.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import emulated_device
import numpy as np
import pytest
import torch
from conftest import ROOT, metrics_of, wavy_pair
from emulated_device import DEVICE
from emulated_log import recorded
from emulated_memory import memory, memory_limit
from emulated_training import as_if_trained, batch_of, waits_of

from pointup.benchmark.sections import ALL
from pointup.benchmark.timing import Effort
from pointup.benchmark.training_step import SingleProcess
from pointup.datasets.batch import move
from pointup.datasets.pair_dataset import write_pairs
from pointup.model.config import ModelConfig
from pointup.training.config import TrainConfig
from pointup.training.distributed.accelerator import make_accelerator
from pointup.training.distributed.reduction import StepReduction
from pointup.training.faults.out_of_memory import in_pieces, num_tokens
from pointup.training.objective import LossConfig, cloud_losses, target_spacing, training_ratio
from pointup.upsampling import upsample

sys.path.insert(0, str(ROOT))
SMALL = ModelConfig(feature_dim=16, num_layers=1)


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with emulated_device.emulated():
        yield


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """An Accelerator on the emulated device, like that of `accelerate launch` on a GPU."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    def accelerator(precision: str = "no", where: torch.device = DEVICE) -> Any:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no" if precision == "fp16" else precision)
        made = make_accelerator(tmp_path)
        monkeypatch.delenv("ACCELERATE_USE_CPU")
        PartialState._shared_state["device"] = where
        AcceleratorState._shared_state["device"] = where
        if precision == "fp16":
            # Accelerate does the same on the devices that it supports.
            AcceleratorState._shared_state["_mixed_precision"] = "fp16"
            made.native_amp, made.scaler = True, torch.amp.GradScaler("gpu", init_scale=1024.0)
        assert made.device == where and made.mixed_precision == precision
        return made

    yield accelerator
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def options(data: Path, run: Path, **more: Any) -> TrainConfig:
    given = {
        "data": (str(data),), "output_dir": run, "steps": 2, "eval_every": 2, "save_every": 1,
        "log_every": 1, "num_workers": 0, "token_budget": 1500, "num_pictures": 0,
        "log_with": (), "model": SMALL, "warmup_steps": 1, "learning_rate": 1e-3,
    }  # fmt: skip
    return TrainConfig(**(given | more))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_a_run_trains_evaluates_saves_and_goes_on_as_on_the_cpu(
    precision: str, pair_directory: Path, tmp_path: Path, make: Callable[..., Any]
) -> None:
    from train import train

    runs = {}
    for name, where in (("cpu", torch.device("cpu")), ("gpu", torch.device("gpu"))):
        if name == "cpu" and precision != "no":
            continue
        config = options(pair_directory, tmp_path / name)
        train(config, make(precision, where), stop_after=1)
        train(config, make(precision, where))
        runs[name] = metrics_of(config.output_dir)
    steps = [line for line in runs["gpu"] if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2]
    assert all(np.isfinite(line["loss"]) for line in steps)
    assert any("validation" in str(line) for line in runs["gpu"])
    if precision == "no":
        expected = [line["loss"] for line in runs["cpu"] if "loss" in line]
        assert [line["loss"] for line in steps] == pytest.approx(expected, rel=1e-3)


def test_a_step_of_several_micro_batches_waits_a_stated_number_of_times(
    tmp_path: Path, make: Callable[..., Any]
) -> None:
    import train

    rng = np.random.default_rng(0)
    data = []
    for name in ("one", "other"):
        pairs = [wavy_pair(f"cloud_{number}", 30, 2.0, rng) for number in range(4)]
        data.append(str(tmp_path / name))
        write_pairs(pairs, pairs[:1], tmp_path / name, info={})
    config = options(tmp_path, tmp_path / "run", steps=1, save_every=9, token_budget=100)
    config = replace(config, data=tuple(data), accumulation_steps=4)
    waits, take = Counter[tuple[str, str]](), train.train_step

    def step(run: Any, batches: Any) -> bool:
        with recorded() as log:
            is_stopped = take(run, batches)
        waits.update((what, where.split(":")[1]) for what, where in log.waits)
        assert not log.blocking_copies
        return is_stopped

    with mock.patch.object(train, "train_step", step):
        train.train(config, make(), stop_after=1)
    assert waits == {
        ("synchronize", "finish"): 1,  # the step's work is timed
        ("copy to the CPU", "finish"): 1,  # totals of the step
        ("value", "train_step"): 1,  # norm of the gradient
    }


def test_a_batch_too_large_to_be_moved_is_cut_on_the_host(tmp_path: Path) -> None:
    batch = batch_of(tmp_path, [60, 50, 70, 40])
    whole = {name: batch[name] for name in batch.keys() if torch.is_tensor(batch[name])}  # noqa: SIM118
    size = sum(values.nbytes for values in whole.values())

    def work(piece: Any) -> torch.Tensor:
        return move(piece, DEVICE).target.new_zeros(piece.num_graphs)

    before = memory.allocated
    with memory_limit(before + int(0.7 * size)), recorded() as log:
        pieces = [piece for piece, _ in in_pieces(batch, work, lambda: None)]
    assert [len(piece.name) for piece in pieces] == [2, 2]
    assert not log.waits and not log.blocking_copies
    assert all(batch[name] is values for name, values in whole.items())
    # Nothing of a batch that was processed stays on the device.
    assert memory.allocated == before


@pytest.mark.slow
@pytest.mark.parametrize("where", [torch.device("gpu"), DEVICE], ids=str)
def test_what_runs_out_of_memory_is_done_again_in_halves_with_the_same_gradient(
    where: torch.device, tmp_path: Path
) -> None:
    batch = batch_of(tmp_path, [60, 50, 70, 40])
    model = as_if_trained().to(where)
    reduction = StepReduction(SingleProcess(DEVICE), model.parameters())

    def propagate(piece: Any) -> torch.Tensor:
        piece = move(piece, where)
        ratio = training_ratio(piece, None, 16.0)
        output = model(piece.pos, piece.ptr, ratio)
        spacing = target_spacing(output.gaps, piece.ptr, ratio)
        losses = cloud_losses(output, piece, spacing, LossConfig())
        losses.sum().backward()
        return losses.detach()

    def gradient(limit: int) -> tuple[list[torch.Tensor], int]:
        reduction.start()
        pieces = 0
        with memory_limit(limit):
            for piece, losses in in_pieces(batch, propagate, reduction.drop_failed):
                pieces += 1
                reduction.add(losses, num_tokens(piece), piece.name)
        reduction.finish(stop=False, elapsed_seconds=0.0)
        return [weight.grad.cpu() for weight in model.parameters()], pieces

    before = memory.allocated
    memory.peak = before
    whole, pieces = gradient(1 << 60)
    assert pieces == 1
    halves, pieces = gradient(before + int(0.75 * (memory.peak - before)))
    assert pieces > 1 and reduction.out_of_memory > 0
    for one, other in zip(halves, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_the_budget_is_the_largest_that_the_memory_of_the_device_holds(
    pair_directory: Path, tmp_path: Path, make: Callable[..., Any], caplog: Any
) -> None:
    from train import train

    budgets = []
    for number, limit in enumerate((60 << 20, 240 << 20)):
        config = options(
            pair_directory, tmp_path / str(number), token_budget="auto", steps=1, eval_every=9
        )
        accelerator = make()
        with memory_limit(limit), caplog.at_level(logging.INFO, "pointup"):
            train(config, accelerator)
        from pointup.training.faults.token_budget import recorded_budget

        budgets.append(recorded_budget(config.output_dir))
    assert 0 < budgets[0] < budgets[1]


def test_a_cloud_is_upsampled_as_on_the_cpu() -> None:
    rng = np.random.default_rng(0)
    points = np.column_stack([rng.random((600, 2)), np.zeros(600)]) + np.array([5e5, 4e6, 0])
    model = as_if_trained()
    expected = upsample(points, 3.0, model=model, device="cpu")
    made = upsample(points, 3.0, model=as_if_trained().to(DEVICE), device=DEVICE)
    assert len(made) == len(expected) == 1800
    # Rounding may decide which of two equally good children is kept.
    same = np.isclose(made, expected, rtol=0, atol=1e-3).all(1)
    assert same.mean() > 0.9


@pytest.mark.slow
@pytest.mark.usefixtures("small_bench")
@pytest.mark.parametrize(
    "section",
    # Reading runs on the CPU.
    [pytest.param(section, id=section.name) for section in ALL if section.name != "reading"],
)
def test_every_section_of_the_bench_runs(section: Any) -> None:
    with recorded() as log:
        rows = list(section.measure(Effort(quick=True, device=torch.device("gpu"))))
    assert rows
    assert all(section.line(row) for row in rows)
    if section.name == "step":
        assert waits_of(log) <= {
            ("synchronize", "pointup/benchmark/timing.py:now"),
            ("synchronize", "pointup/training/faults/available_memory.py:__exit__"),
            ("synchronize", "pointup/training/distributed/reduction.py:finish"),
            ("copy to the CPU", "pointup/training/distributed/reduction.py:finish"),
        }


@pytest.mark.slow
def test_what_is_for_the_day_a_gpu_is_at_hand_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("docs", "tests/training"):
        monkeypatch.syspath_prepend(ROOT / folder)
    measure_gpu = importlib.import_module("measure_gpu")
    with (
        mock.patch.multiple(measure_gpu, SIZES=(60, 300), BUDGETS=(700,), STEPS=1),
        mock.patch.object(measure_gpu.subprocess, "run") as bench,
    ):
        measure_gpu.main()
    assert bench.call_args.args[0][2:] == ["pointup", "bench", "--device", "gpu"]
    # One size fits the budget.
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0] for line in lines[1:]] == ["| fp32", "| bf16", "| fp16"]
    on_gpu = importlib.import_module("test_on_gpu")
    on_gpu.test_normals_are_those_of_the_cpu()
    on_gpu.test_a_step_has_a_loss_like_that_of_the_cpu("bf16")
