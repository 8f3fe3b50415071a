"""`pointup doctor`: checks this machine, a dataset or a run."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pointup.option_help import optional

if TYPE_CHECKING:
    from pointup.cli.doctor.findings import Finding


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Check this machine, and with --data or --run a dataset or a run; print a fix for each
    problem.

    The exit status is 1 if a check fails.
    """

    data: Annotated[str | None, optional("DIR")] = None
    """Check the sample tables of this pair dataset, too."""
    run_dir: Annotated[Path | None, optional("DIR", name="run")] = None
    """Check the run in this directory, too: lock, last heartbeat, checkpoints and model."""

    def run(self) -> int:
        # One process of a launch speaks for its machine.
        if os.environ.get("LOCAL_RANK", "0") != "0":
            return 0
        levels: Counter[str] = Counter()
        for finding in self._findings():
            levels[finding.level] += 1
            print(finding, flush=True)
        number = levels["warn"]
        warnings = f"{number} warning{'s' * (number != 1)}" if number else "no warnings"
        failed = f"{levels['fail']} failed" if levels["fail"] else "No check failed"
        print(f"\n{failed}, {warnings}.", flush=True)
        return int(levels["fail"] > 0)

    def _findings(self) -> Iterator[Finding]:
        import torch

        from pointup.cli.doctor.findings import (
            data_findings,
            device_findings,
            machine_findings,
            run_findings,
        )
        from pointup.disk import readable_json
        from pointup.model.config import ModelConfig
        from pointup.training.config import DEFAULTS, TrainConfig

        options = readable_json(self.run_dir / "config.json") if self.run_dir else {}
        num_workers = options.get("num_workers", TrainConfig.num_workers)
        token_budget = options.get("token_budget", TrainConfig.token_budget)
        token_budget = options.get("found_token_budget", token_budget)
        to_hold = DEFAULTS.token_budget if token_budget is None else token_budget
        yield from machine_findings(num_workers, to_hold)
        kind, number = torch.accelerator.current_accelerator(), torch.accelerator.device_count()
        for device in [f"{kind}:{i}" for i in range(number)] or ["cpu"]:
            yield from device_findings(torch.device(device))
        if self.data:
            min_points = options.get("model", {}).get("k", ModelConfig.k)
            # With --crop a run crops what exceeds its budget.
            largest = None if options.get("crop") else token_budget
            yield from data_findings(self.data, min_points, largest)
        if self.run_dir:
            yield from run_findings(self.run_dir)
