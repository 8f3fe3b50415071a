"""Out of memory on one of two processes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from disturbed import (
    PATIENCE,
    continues,
    has_ended_within,
    latest_of,
    launched,
    log_of,
    output_of,
    weights_of,
)
from test_distributed import steps_of


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_out_of_memory_on_one_process_changes_nothing(
    pair_directory: Path, tmp_path: Path, undisturbed: Path, where: str
) -> None:
    run = tmp_path / "run"
    with launched(pair_directory, run, fault=f"oom {where} 3 1") as process:
        assert process.wait(PATIENCE) == 0, output_of(run)
        assert has_ended_within(
            120, run, f"out of memory in {where}: done again in halves, ends with the same losses"
        )
    assert "done again in halves" in log_of(run, 1)
    for expected, actual in zip(steps_of(undisturbed), steps_of(run), strict=True):
        assert actual["num_clouds"] == expected["num_clouds"]
        assert actual["out_of_memory"] == (actual["step"] == 3)
        assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


@pytest.mark.slow
def test_repeated_out_of_memory_on_one_process_lowers_the_budget_of_both(
    pair_directory: Path, tmp_path: Path
) -> None:
    options = ("--token-budget", 1600)
    runs = {"whole": "small forward 3 1", "stopped": "small forward 3 1"}
    for name, fault in runs.items():
        run = tmp_path / name
        with launched(pair_directory, run, *options, fault=fault) as process:
            if name == "stopped":
                while "lowered from" not in (output_of(run)):
                    assert process.poll() is None, output_of(run)
                process.terminate()
            process.wait(PATIENCE)
    assert latest_of(tmp_path / "stopped") != "step_12", "over before the signal came"
    with launched(pair_directory, tmp_path / "stopped", *options, fault=runs["stopped"]) as process:
        assert process.wait(PATIENCE) == 0
    for rank in (0, 1):
        assert "lowered from 1,600 to 1,280 for all processes" in log_of(tmp_path / "whole", rank)
    for name, weight in weights_of(tmp_path / "whole").items():
        assert torch.equal(weight, weights_of(tmp_path / "stopped")[name])


@pytest.mark.slow
def test_the_automatic_budget_is_that_of_the_process_with_least_memory(
    pair_directory: Path, tmp_path: Path
) -> None:
    found = {}
    options = ("--token-budget", "auto", "--steps", 1)
    for name, fault in (("much", "memory none 60000000"), ("little", "memory none 12000000 1")):
        run = tmp_path / name
        with launched(pair_directory, run, *options, fault=fault) as process:
            assert process.wait(PATIENCE) == 0, output_of(run)
        found[name] = json.loads((run / "config.json").read_text())["found_token_budget"]
        assert all(line["num_tokens"] <= 2 * found[name] for line in steps_of(run))
    assert found["little"] < found["much"]
    again = tmp_path / "little"
    continues(pair_directory, again, *options)
    assert len(re.findall("Searching for the largest token budget", log_of(again))) == 1
