"""Checks several processes: a launch, and a collective of training."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from pointup.cli.doctor.finding import Finding, fail, ok, reason_of, warn
from pointup.errors import ConfigError, TrainingError
from pointup.model.upsampler import Upsampler
from pointup.shipped import shipped_file
from pointup.terminal import in_bytes
from pointup.training.distributed.accelerator import (
    check_number_of_processes,
    make_accelerator,
)

MODULE = "pointup.cli.doctor.group"
SECONDS = 300.0
"""Timeout of a launch."""
MINUTES = 2.0
"""Timeout of a collective, and of the start of a group."""
REPEATS = 5
SLOW_SECONDS = 0.25
REMEDY = (
    "set NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME to the network interface, open its ports in the "
    "firewall; NCCL_DEBUG=INFO logs more"
)
LAUNCH_PREFIXES = (
    "ACCELERATE_", "TORCHELASTIC_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_",
)  # fmt: skip
"""Prefixes of environment variables of a launch, removed from the environment of a new one."""
REASON = re.compile(
    r"^(?:\[rank\d+\]: *)?((?!\S*ChildFailedError)[\w.]*(?:Error|Exception)\b.*)", re.M
)
"""The exception of a process of a failed launch, not the launcher's own one, which says nothing."""


def launched_groups() -> Iterator[Finding]:
    """Launch two processes on the CPU, and one for each accelerator where there are several."""
    try:
        check_number_of_processes()
    except ConfigError as error:
        yield fail("group", *str(error).split("; "))
    yield from launch(2, "cpu2.yaml")
    if (number := torch.accelerator.device_count()) > 1:
        yield from launch(number, "8gpu.yaml")


def launch(num_processes: int, configuration: str) -> list[Finding]:
    """Launch a group with an included configuration, and check it."""
    what = f"{num_processes} processes with {configuration}"
    with tempfile.TemporaryDirectory(prefix="pointup_") as folder:
        answer, output = Path(folder, "answer"), Path(folder, "output")
        command = [
            sys.executable, "-m", "accelerate.commands.launch",
            "--config_file", str(shipped_file(f"accelerate_configs/{configuration}")),
            "--num_processes", str(num_processes), "--main_process_port", "0",
            "--monitor_interval", "0.2", "-m", MODULE, str(answer),
        ]  # fmt: skip
        environment = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCH_PREFIXES)}
        environment.setdefault("OMP_NUM_THREADS", "1")
        began = time.monotonic()
        with output.open("w") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
            try:
                process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                text = f"{what} did not end within {SECONDS:.0f} s"
                return [fail("launch", text, "run `accelerate test`, and check the machine's load")]
            finally:
                end(process)
        if process.returncode or not answer.is_file():
            found = REASON.search(output.read_text(errors="replace"))
            reason = found[1] if found else f"exit status {process.returncode}"
            return [fail("launch", f"{what} failed: {reason}", "run `accelerate test`")]
        seconds = time.monotonic() - began
        findings = [Finding(**finding) for finding in json.loads(answer.read_text())]
        return [ok("launch", f"{what}, started and ended in {seconds:.0f} s"), *findings]


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a launcher and all its children, which are in sessions of their own."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for member in [*psutil.Process(process.pid).children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
    process.wait()


def join() -> Accelerator | Finding:
    """The process group of this launch, or a failed check if it can't be formed."""
    try:
        return make_accelerator(Path(), collective_timeout_minutes=MINUTES)
    except ConfigError as error:
        return fail("group", reason_of(error), "fix the launch configuration")
    except (TrainingError, RuntimeError, OSError) as error:
        where = f"process {os.environ.get('RANK')} on {platform.node()}"
        reason = reason_of(error.__cause__ or error)
        text = f"{where} found no group of {os.environ.get('WORLD_SIZE')}: {reason}"
        remedy = f"start all machines at once, on one --main_process_ip; {REMEDY}"
        return fail("group", text, remedy)


def joint_findings(accelerator: Accelerator, own: list[Finding]) -> list[Finding]:
    """The findings `own` of all processes, followed by checks of the group.

    Every process must call this. Findings that are equal on all machines are reported once.
    """
    try:
        gathered = gather_object([(platform.node(), own)])
        number, backend = accelerator.num_processes, torch.distributed.get_backend()
        hosts = Counter(host for host, _ in gathered).items()
        on = ", ".join(f"{number} on {host}" for host, number in hosts)
        return [
            *merged(gathered),
            ok("group", f"{number} processes over {backend}: {on}"),
            all_reduce_finding(accelerator),
        ]
    except RuntimeError as error:
        return [fail("group", f"a process has ended: {reason_of(error)}", REMEDY)]


def merged(gathered: list[tuple[str, list[Finding]]]) -> list[Finding]:
    """Findings in the order of the processes, prefixed by the machines if not all have them."""
    hosts_of: dict[Finding, set[str]] = {}
    for host, findings in gathered:
        for finding in findings:
            hosts_of.setdefault(finding, set()).add(host)
    hosts = {host for host, _ in gathered}
    return [
        finding
        if some == hosts
        else replace(finding, text=f"{', '.join(sorted(some))}: {finding.text}")
        for finding, some in hosts_of.items()
    ]


def all_reduce_finding(accelerator: Accelerator) -> Finding:
    """Sum as many numbers as the default model has weights over all processes, as each step does.

    Every process must call this; the result is checked on all of them.
    """
    num_weights = sum(weight.numel() for weight in Upsampler().parameters())
    ones = torch.ones(num_weights, device=accelerator.device)
    # The first reduction opens connections.
    accelerator.reduce(ones, reduction="sum")
    began = time.perf_counter()
    for _ in range(REPEATS):
        reduced = accelerator.reduce(ones, reduction="sum")
        is_right = bool((reduced == accelerator.num_processes).all())
    seconds = (time.perf_counter() - began) / REPEATS
    gathered = gather_object([(seconds, is_right)])
    longest = max(seconds for seconds, _ in gathered)
    text = f"{1000 * longest:.2g} ms: {in_bytes(4 * num_weights)} of gradients, every step"
    wrong = [str(rank) for rank, (_, is_right) in enumerate(gathered) if not is_right]
    if wrong:
        text = f"wrong result on process {', '.join(wrong)}; {text}"
        return fail("all-reduce", text, "check network and accelerators")
    if longest > SLOW_SECONDS:
        return warn("all-reduce", text, f"slow: {REMEDY}")
    return ok("all-reduce", text)


def main(answer: Path) -> None:
    """Entry point of the processes that `launch` starts; the main one writes the findings."""
    accelerator = join()
    is_joined = isinstance(accelerator, Accelerator)
    findings = joint_findings(accelerator, []) if is_joined else [accelerator]
    if os.environ.get("RANK", "0") == "0":
        answer.write_text(json.dumps([asdict(finding) for finding in findings]))
    if isinstance(accelerator, Accelerator):
        # Torch can abort a process that ends while it is in a group.
        accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
