"""Checks of the machine and of a single process, among them a launch of several processes."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import psutil
import torch
from packaging.requirements import Requirement

import pointup
from pointup.cli.doctor.accelerators import (
    accelerator_findings,
    compute_finding,
    kernel_finding,
    speed_findings,
)
from pointup.cli.doctor.finding import Finding, fail, in_bytes, in_time, ok, warn
from pointup.errors import ConfigError
from pointup.training.distributed.accelerator import check_number_of_processes
from pointup.training.faults.available_memory import (
    cores_of_process,
    memory_limit,
    num_local_processes,
)

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


NAMED_PACKAGES = ("torch", "accelerate", "datasets", "numpy", "torch-geometric")
ENOUGH_OPEN_FILES = 1024
FEWEST_OPEN_FILES = 256
LITTLE_MEMORY = 2e9
LITTLE_DISK = 5e9
NO_DISK = 0.5e9
BYTES_PER_TOKEN = 64
"""Bytes of a token in a batch: coordinates, normals and indices, rounded up."""
BATCHES_PER_WORKER = 3
"""Batches in shared memory for each worker: two prefetched, and the one in use."""
TOKENS_OF_AUTO = 2_000_000
"""Upper bound of the budget that `--token-budget auto` finds on a large GPU."""


def machine_findings(num_workers: int, token_budget: int | str) -> Iterator[Finding]:
    """Findings on this machine without its accelerators, for a run with these options."""
    num_processes = num_local_processes(max(torch.accelerator.device_count(), 1))
    yield from environment_findings()
    yield capacity_finding()
    yield open_files_finding(*open_files_limits())
    needed = shared_memory_needed(num_workers, token_budget, num_processes)
    yield shared_memory_finding(needed, Path("/dev/shm"))
    for subject, path in (("disk", Path.cwd()), ("disk, temporaries", Path(tempfile.gettempdir()))):
        yield disk_finding(subject, path)


def environment_findings() -> Iterator[Finding]:
    yield ok(
        "environment",
        f"pointup {pointup.__version__}, Python {platform.python_version()}, "
        f"{platform.system()} {platform.machine()}",
    )
    try:
        requirements = requires("pointup") or []
    except PackageNotFoundError:
        yield warn("packages", "pointup is not installed", "run `pip install -e .` in its folder")
        return
    versions = ", ".join(f"{name} {version(name)}" for name in NAMED_PACKAGES)
    unmet = [text for text in requirements if not is_met(Requirement(text))]
    if unmet:
        quoted = " ".join(f"'{text}'" for text in unmet)
        text = f"{', '.join(unmet)} is not installed; {versions}"
        yield fail("packages", text, f"`pip install {quoted}`")
    else:
        yield ok("packages", versions)


def is_met(requirement: Requirement) -> bool:
    """Whether a required package is installed. Requirements of extras are always met."""
    if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
        return True
    try:
        return requirement.specifier.contains(version(requirement.name), prereleases=True)
    except PackageNotFoundError:
        return False


def capacity_finding() -> Finding:
    cores, load = os.cpu_count() or 1, psutil.getloadavg()[0]
    # The limits of the machine, or of the container or batch job of this process.
    own = cores_of_process()
    of_all = f" of {cores}" if own < cores else ""
    free, total = memory_limit(torch.device("cpu"), 1), psutil.virtual_memory().total
    text = (
        f"{own:.3g}{of_all} cores and {in_bytes(free)} of {in_bytes(total)} memory for this job; "
        f"load {load:.1f}"
    )
    subject = "cores, memory"
    if free < LITTLE_MEMORY:
        return warn(subject, text, "end other programs, or use a smaller --token-budget")
    # The load is that of all cores, also of those of other jobs.
    if load > 2 * cores:
        return warn(subject, text, "other programs use the cores: training will be slow")
    return ok(subject, text)


def open_files_limits() -> tuple[float, float]:
    """The soft and the hard limit of open files; infinity if there is none."""
    try:
        import resource
    except ImportError:  # Windows
        return float("inf"), float("inf")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (float("inf") if n == resource.RLIM_INFINITY else n for n in limits)
    return soft, hard


def open_files_finding(soft: float, hard: float) -> Finding:
    """Check the limits: every tensor on its way from a data worker is an open file."""
    text = f"at most {soft:,.0f} at a time, {hard:,.0f} once the loader raises its limit"
    if hard >= ENOUGH_OPEN_FILES:
        return ok("open files", text)
    remedy = f"raise the hard limit to {ENOUGH_OPEN_FILES:,} (`ulimit -Hn`, limits.conf)"
    found = warn if hard >= FEWEST_OPEN_FILES else fail
    return found("open files", text, remedy)


def shared_memory_finding(needed: int, path: Path) -> Finding:
    """Check /dev/shm: data workers pass batches to the training process in shared memory."""
    if not path.is_dir():
        return ok(str(path), "not on this system: shared memory is limited by memory only")
    free = shutil.disk_usage(path).free
    text = f"{in_bytes(free)} free, the loader needs {in_bytes(needed)}"
    remedy = "enlarge it (docker run --shm-size 8g), or train with --num-workers 0"
    if free < needed:
        return fail(str(path), text, remedy)
    return warn(str(path), text, remedy) if free < 2 * needed else ok(str(path), text)


def shared_memory_needed(num_workers: int, token_budget: int | str, num_processes: int) -> int:
    """Bytes in shared memory between all data workers and processes of one machine."""
    tokens = token_budget if isinstance(token_budget, int) else TOKENS_OF_AUTO
    return tokens * BYTES_PER_TOKEN * BATCHES_PER_WORKER * num_workers * num_processes


def disk_finding(subject: str, path: Path) -> Finding:
    """Whether `path`, or its nearest existing parent, has free space and is writable."""
    folder = next(place for place in (path, *path.absolute().parents) if place.is_dir())
    free = shutil.disk_usage(folder).free
    if not os.access(folder, os.W_OK):
        return fail(subject, f"{folder} can't be written to", "give another --output-dir")
    text = f"{in_bytes(free)} free in {folder}"
    if free >= LITTLE_DISK:
        return ok(subject, text)
    found = warn if free >= NO_DISK else fail
    return found(subject, text, "free disk space for checkpoints and upsampled files")
