"""Checks of a single process, among them a launch of several processes by `accelerate launch`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from pointup.cli.doctor.accelerators import accelerator_findings, compute_finding
from pointup.cli.doctor.finding import Finding, fail, in_time, ok
from pointup.cli.doctor.kernels import kernel_finding, speed_findings
from pointup.cli.doctor.machine import machine_findings
from pointup.errors import ConfigError
from pointup.training.distributed.accelerator import check_number_of_processes

SECONDS = 300.0
MODULE = "pointup.cli.doctor.process_group"
LAUNCH_PREFIXES = (
    "ACCELERATE_",
    "TORCHELASTIC_",
    "MASTER_",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "GROUP_",
)
"""Prefixes of environment variables of a launch, removed from the environment of a new one."""
REASONS = (
    r"^(?:\[rank\d+\]: *)?((?!\S*ChildFailedError)[\w.]*(?:Error|Exception)\b.*)",
    r"^ *what\(\): *(.+)",
    r"(Signal \d+ \(\w+\))",
    r"(exitcode *: *-?\d+)",
)
"""Lines of a failed launch, by what they tell: an exception of a process (the last line of its
traceback; the launcher's own one says nothing), of C++, a signal, a status."""
CONFIG = """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
use_cpu: {use_cpu}
mixed_precision: "no"
num_machines: 1
num_processes: {num_processes}
machine_rank: 0
main_process_port: 0
main_training_function: main
"""


def single_process_findings(num_workers: int, token_budget: int | str) -> Iterator[Finding]:
    """All checks of a process without a launcher. It launches groups of processes itself."""
    yield from machine_findings(num_workers, token_budget)
    yield from accelerator_findings()
    kind, number = torch.accelerator.current_accelerator(), torch.accelerator.device_count()
    for device in [f"{kind}:{i}" for i in range(number)] or ["cpu"]:
        yield from device_findings(torch.device(device))
    try:
        check_number_of_processes()
    except ConfigError as error:
        yield fail("group", *str(error).split("; "))
    yield from launch(2, use_cpu=True)
    if number > 1:
        yield from launch(number, use_cpu=False)


def device_findings(device: torch.device) -> Iterator[Finding]:
    """Check a device; on CUDA check the kernels, too, and their speed."""
    compute = compute_finding(device)
    yield compute
    if device.type == "cuda" and compute.level == "ok":
        found = kernel_finding(device)
        yield found
        if found.level == "ok":
            yield from speed_findings(device)


def launch(
    num_processes: int, use_cpu: bool, module: str = MODULE, seconds: float = SECONDS
) -> list[Finding]:
    """Launch `module` in a group; it writes its findings to the file named by its argument."""
    where = "on the CPU" if use_cpu else "on accelerators"
    with tempfile.TemporaryDirectory(prefix="pointup_") as folder:
        config, answer, output = (Path(folder) / n for n in ("config.yaml", "answer", "output"))
        config.write_text(CONFIG.format(use_cpu=use_cpu, num_processes=num_processes))
        command = [
            sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config),
            "--monitor_interval", "0.2", "-m", module, str(answer),
        ]  # fmt: skip
        environment = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCH_PREFIXES)}
        began = time.monotonic()
        with output.open("w") as file:
            process = subprocess.Popen(
                command,
                stdout=file,
                stderr=file,
                env={"OMP_NUM_THREADS": "1", **environment},
            )
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                text = f"{num_processes} processes {where} did not end within {in_time(seconds)}"
                return [fail("launch", text, "run `accelerate test`, and check the machine's load")]
            finally:
                end(process)
        if process.returncode or not answer.is_file():
            reason = reason_of_launch(output.read_text(errors="replace"))
            text = f"{num_processes} processes {where} failed: {reason}"
            return [fail("launch", text, "run `accelerate test`")]
        findings = [Finding(**finding) for finding in json.loads(answer.read_text())]
        took = in_time(time.monotonic() - began)
        text = f"{num_processes} processes {where}, started and ended in {took}"
        return [ok("launch", text), *findings]


def reason_of_launch(output: str) -> str:
    """Why a launch failed, by its output: the exception of a process, its signal or its status."""
    for pattern in REASONS:
        if found := re.search(pattern, output, re.MULTILINE):
            return found[1]
    return "no error line"


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a launcher and all its children, which are in sessions of their own."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for member in [*psutil.Process(process.pid).children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
    process.wait()
