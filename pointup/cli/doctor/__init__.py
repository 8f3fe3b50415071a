"""`pointup doctor`: checks this machine, a dataset or a run."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from pointup.cli.doctor.finding import Finding

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Check this machine, and with --data or --run a dataset or a run; print a fix for each
    problem.

    With `accelerate launch ... -m pointup doctor`, all processes check their machines, and the
    collectives between them. The exit status is 1 if a check fails.
    """

    data: Annotated[str | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(optional)")] = (
        None
    )
    """Check the sample tables of this pair dataset, too."""
    run_dir: Annotated[
        Path | None, tyro.conf.arg(name="run", metavar="DIR", help_behavior_hint="(optional)")
    ] = None
    """Check the run in this directory, too: lock, last heartbeat, checkpoints and model."""

    def run(self) -> int:
        from pointup.cli.doctor.group import join

        group = join() if int(os.environ.get("WORLD_SIZE", 1)) > 1 else None
        if isinstance(group, Finding):
            # Every machine prints it: the machine of the main process can be the missing one.
            if os.environ.get("LOCAL_RANK", "0") == "0":
                print(group, flush=True)
            return 1
        levels: Counter[str] = Counter()
        for finding in self._findings(group):
            levels[finding.level] += 1
            if group is None or group.is_main_process:
                print(finding, flush=True)
        if group is None or group.is_main_process:
            print(f"\n{summary(levels)}", flush=True)
        if group is not None:
            group.end_training()
        return int(levels["fail"] > 0)

    def _findings(self, group: Accelerator | None) -> Iterator[Finding]:
        """The findings, one by one; every process of a group must exhaust them."""
        from pointup.cli.doctor.group import joint_findings, launched_groups
        from pointup.cli.doctor.machine import device_findings, devices, machine_findings
        from pointup.cli.doctor.run_directory import data_findings, read_config, run_findings
        from pointup.model.config import ModelConfig
        from pointup.training.config import DEFAULT_TOKEN_BUDGET, TrainConfig

        options = read_config(self.run_dir) if self.run_dir else {}
        num_workers = options.get("num_workers", TrainConfig.num_workers)
        token_budget = options.get("token_budget", TrainConfig.token_budget)
        token_budget = options.get("found_token_budget", token_budget)
        to_hold = DEFAULT_TOKEN_BUDGET if token_budget is None else token_budget
        if group is None:
            yield from machine_findings(num_workers, to_hold)
            for device in devices():
                yield from device_findings(device)
            yield from launched_groups()
        else:
            machine = group.is_local_main_process and machine_findings(num_workers, to_hold)
            own = [*(machine or ()), *device_findings(group.device)]
            yield from joint_findings(group, own)
            if not group.is_main_process:
                return
        if self.data:
            min_points = options.get("model", {}).get("k", ModelConfig.k)
            yield from data_findings(self.data, min_points, token_budget)
        if self.run_dir:
            yield from run_findings(self.run_dir)


def summary(levels: Counter[str]) -> str:
    number = levels["warn"]
    warnings = f"{number} warning{'s' * (number != 1)}" if number else "no warnings"
    failed = f"{levels['fail']} failed" if levels["fail"] else "No check failed"
    return f"{failed}, {warnings}."
