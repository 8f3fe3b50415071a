"""Faulty data workers, samples and datasets, on real processes."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import metrics_of, wavy_pair
from disturbed import (
    PATIENCE,
    STEPS,
    assert_ends_like,
    continues,
    ends,
    has_ended_within,
    launched,
    log_of,
    output_of,
    timed,
    weights_of,
)
from test_distributed import steps_of

from pointup.datasets.pair import Pair
from pointup.datasets.pair_writer import write_pairs


@pytest.mark.slow
@pytest.mark.parametrize(
    "what, message", [("kill", "killed by signal"), ("hang", "timed out"), ("raise", "is broken")]
)
def test_a_data_worker_that_dies_hangs_or_raises_ends_the_run_within_its_timeout(
    pair_directory: Path, tmp_path: Path, undisturbed: Path, what: str, message: str
) -> None:
    run = tmp_path / "run"
    # At about step 8: a process reads two or three clouds a step.
    fault = f"{what} worker 22 1"
    with launched(
        pair_directory, run, "--worker-timeout", 5, fault=fault, num_workers=1
    ) as process:
        assert process.wait(PATIENCE) != 0
        does = {
            "kill": "killed",
            "hang": "hung, --worker-timeout 5",
            "raise": "exception in one sample",
        }
        assert has_ended_within(
            60, run, f"data worker: {does[what]}: exit not 0, continues bit for bit"
        )
    assert message in log_of(run, 1), log_of(run, 1)
    continues(pair_directory, run)
    assert_ends_like(run, undisturbed)


@pytest.mark.slow
def test_a_corrupt_sample_on_one_process_is_reported_before_the_first_step(
    pair_directory: Path, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)

    def pairs(split: str, number: int) -> Iterator[Pair]:
        for i in range(number):
            pair = wavy_pair(f"{split}_{i}", int(rng.integers(20, 120)), rng.uniform(2, 4), rng)
            if (split, i) == ("train", 17):
                pair.source[3] = np.nan
            yield pair

    broken = tmp_path / "broken"
    write_pairs(pairs("train", 40), pairs("validation", 6), broken, info={})
    run = tmp_path / "run"
    fault = f"differ {broken} 0 1"
    with launched(pair_directory, run, fault=fault) as process, timed("corrupt sample: reported"):
        assert process.wait(PATIENCE) != 0
    assert re.search(
        r"process 1 on \S+ differs from process 0 in dataset: .*train.samples 39, there 40",
        output_of(run),
    ), output_of(run)


@pytest.mark.slow
def test_a_dataset_that_one_process_can_not_read_is_reported_with_its_path(
    pair_directory: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(pair_directory, broken)
    for path in (broken / "train").glob("*.arrow"):
        path.write_bytes(path.read_bytes()[:1000])
    run = tmp_path / "run"
    fault = f"differ {broken} 0 1"
    with (
        launched(pair_directory, run, fault=fault) as process,
        timed("unreadable dataset: reported"),
    ):
        assert process.wait(PATIENCE) != 0
    assert re.search(rf"train.py: error: {broken}: can't be opened", output_of(run)), output_of(run)


@pytest.mark.slow
def test_a_cloud_with_a_non_finite_loss_on_one_process_is_named_and_all_skip_the_step(
    pair_directory: Path, tmp_path: Path, undisturbed: Path
) -> None:
    run = tmp_path / "run"
    with launched(pair_directory, run, fault="nan forward 5 1") as process:
        assert process.wait(PATIENCE) == 0, output_of(run)
        assert has_ended_within(120, run, "NaN in one micro-batch: step skipped by all, trained on")
    assert re.search(r"step 4 skipped: loss nan, gradient nan, .*from train_\d+", log_of(run))
    assert all(weight.isfinite().all() for weight in weights_of(run).values())
    before = [line["loss"] for line in steps_of(undisturbed)]
    now = [line["loss"] for line in steps_of(run)]
    assert now[:4] == before[:4] and now[4] is None and len(now) == STEPS


@pytest.fixture
def few_pairs(tmp_path: Path) -> Path:
    """Three pairs to train on, fewer than there are slots."""
    rng = np.random.default_rng(0)
    pairs = [wavy_pair(f"cloud_{i}", 30 + 40 * i, 3.0, rng) for i in range(5)]
    write_pairs(pairs[:3], pairs[3:], tmp_path / "few", info={})
    return tmp_path / "few"


@pytest.mark.slow
def test_processes_with_only_empty_batches_change_nothing(few_pairs: Path, tmp_path: Path) -> None:
    runs = {}
    for num_processes in (1, 4):
        runs[num_processes] = tmp_path / f"run_{num_processes}"
        options = ("--accumulation-steps", 4 // num_processes)
        ends(few_pairs, runs[num_processes], *options, num_processes=num_processes)
    expected, actual = (steps_of(run) for run in runs.values())
    assert [line["num_clouds"] for line in actual] == [3] * STEPS
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in actual] == [line[name] for line in expected]
    for name, weight in weights_of(runs[1]).items():
        assert torch.equal(weight, weights_of(runs[4])[name])


@pytest.mark.slow
def test_weights_without_gradient_on_one_process_count_as_zero_there(
    pair_directory: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with launched(pair_directory, run, fault="lose window 5 1") as process:
        assert process.wait(PATIENCE) == 0, output_of(run)
        assert has_ended_within(120, run, "weights without gradient on one process: trained on")
    steps = steps_of(run)
    assert len(steps) == STEPS and all(np.isfinite(line["loss"]) for line in steps)
    assert [line for line in metrics_of(run) if "validation" in line]
