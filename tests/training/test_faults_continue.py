"""Runs that continue with other numbers of processes, slots, budgets and precisions."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from conftest import metrics_of
from disturbed import (
    PATIENCE,
    STEPS,
    assert_ends_like,
    ends,
    latest_of,
    launched,
    log_of,
    output_of,
)

from pointup.training.run_directory.checkpoint import step_of


@pytest.mark.slow
def test_a_run_of_four_slots_continues_with_one_two_and_four_processes(
    pair_directory: Path, tmp_path: Path
) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    ends(pair_directory, whole, "--accumulation-steps", 4, num_processes=1)
    steps = [0]
    for num_processes, step in ((4, 1), (1, 2), (2, 1), (4, 2)):
        options = ("--accumulation-steps", 4 // num_processes)
        fault = f"terminate reduction {step} {num_processes - 1}"
        with launched(
            pair_directory, run, *options, fault=fault, num_processes=num_processes
        ) as process:
            process.wait(PATIENCE)
        steps.append(step_of(Path(latest_of(run))))
        assert steps[-2] < steps[-1] < STEPS, "stopped under way"
    ends(pair_directory, run, "--accumulation-steps", 2, num_processes=2)
    assert_ends_like(run, whole)


@pytest.mark.slow
def test_with_other_slots_and_budgets_each_cloud_of_an_epoch_is_still_seen_once(
    pair_directory: Path, tmp_path: Path
) -> None:
    run, seen = tmp_path / "run", tmp_path / "seen"
    seen.mkdir()
    settings = (
        (2, ("--token-budget", 900), "terminate reduction 2 1"),
        (1, ("--token-budget", 600), "terminate reduction 3"),
        (4, ("--token-budget", 700), "terminate reduction 1 3"),
        (2, ("--token-budget", 800, "--accumulation-steps", 2), "none none 0 none"),
    )
    for num_processes, options, fault in settings:
        command = ("--steps", None, "--epochs", 1, *options)
        with launched(
            pair_directory, run, *command, fault=fault, num_processes=num_processes, SEEN=str(seen)
        ) as process:
            ended = process.wait(PATIENCE)
    assert ended == 0, output_of(run)
    counts = Counter(name for path in seen.iterdir() for name in path.read_text().split())
    assert counts == Counter(f"train_{i}" for i in range(40))
    assert "token_budget changed from 900 to 600" in log_of(run)
    assert "slots changed from 1 to 4" in log_of(run, 3)


@pytest.mark.slow
def test_a_run_continues_in_bf16_with_a_warning_in_the_logs(
    pair_directory: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with launched(pair_directory, run, fault="terminate reduction 5 1") as process:
        process.wait(PATIENCE)
    with launched(pair_directory, run, mixed_precision="bf16") as process:
        assert process.wait(PATIENCE) == 0, output_of(run)
    for rank in (0, 1):
        assert "mixed_precision changed from no to bf16" in log_of(run, rank)
    assert [line for line in metrics_of(run) if line.get("step") == 12]
