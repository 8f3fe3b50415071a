"""Findings of `pointup doctor`: on a machine with its devices, on a run directory, on a dataset."""

from __future__ import annotations

import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import numpy as np
import psutil
import torch
from safetensors import SafetensorError, safe_open

import pointup
from pointup.datasets.checks import notes_on_pairs
from pointup.datasets.opening import open_samples
from pointup.disk import readable_json
from pointup.errors import DataError, PointupError
from pointup.geometry import kernels
from pointup.geometry.kernels import trial
from pointup.terminal import first_line, in_bytes
from pointup.training.distributed.accelerator import why_no_accelerator
from pointup.training.faults.available_memory import (
    cores_of_process,
    memory_limit,
    num_local_processes,
)
from pointup.training.run_directory.checkpoint import (
    FILES,
    LATEST,
    checkpoint_directories,
    damaged_files,
    fault_of,
    named_by,
    offer_instead_of,
    whole_checkpoints,
)
from pointup.training.run_directory.lock import inspect_lock

SUBJECT_WIDTH = 18


@dataclass(frozen=True)
class Finding:
    """The result of one check; a warning is a problem that keeps nothing from working."""

    level: Literal["ok", "warn", "fail"]
    subject: str
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{self.level:<5} {self.subject:<{SUBJECT_WIDTH}} {' '.join(self.text.split())}"
        return f"{line}\n{'':{SUBJECT_WIDTH + 6}} -> {self.remedy}" if self.remedy else line


ok, warn, fail = partial(Finding, "ok"), partial(Finding, "warn"), partial(Finding, "fail")


def graded(
    subject: str, text: str, remedy: str, value: float, least: float, enough: float
) -> Finding:
    """A finding that fails below `least`, and warns below `enough`."""
    if value >= enough:
        return ok(subject, text)
    return (warn if value >= least else fail)(subject, text, remedy)


NAMED_PACKAGES = ("torch", "accelerate", "datasets", "numpy", "torch-geometric")
LITTLE_MEMORY = 2e9
NO_DISK, LITTLE_DISK = 0.5e9, 5e9
SHARE_IN_USE = 0.1
"""Share of a device's memory above which another program uses it."""
BYTES_PER_TOKEN = 64
"""Bytes of a token in a batch: coordinates, normals and indices, rounded up."""
BATCHES_PER_WORKER = 3
"""Batches in shared memory for each worker: two prefetched, and the one in use."""
TOKENS_OF_AUTO = 2_000_000
"""Upper bound of the budget that `--token-budget auto` finds on a large GPU."""


def machine_findings(num_workers: int, token_budget: int | str) -> Iterator[Finding]:
    """Findings on this machine without its devices, for a run with these options."""
    system = f"{platform.system()} {platform.machine()}"
    python = platform.python_version()
    yield ok("environment", f"pointup {pointup.__version__}, Python {python}, {system}")
    yield ok("packages", ", ".join(f"{name} {version(name)}" for name in NAMED_PACKAGES))
    yield capacity_finding()
    num_processes = num_local_processes(max(torch.accelerator.device_count(), 1))
    needed = shared_memory_needed(num_workers, token_budget, num_processes)
    yield shared_memory_finding(needed, Path("/dev/shm"))
    yield disk_finding("disk", Path.cwd())
    yield disk_finding("disk, temporaries", Path(tempfile.gettempdir()))
    yield accelerators_finding()


def capacity_finding() -> Finding:
    """Check the limits of the machine, or of the container or batch job of this process."""
    subject, cores, load = "cores, memory", os.cpu_count() or 1, psutil.getloadavg()[0]
    own = cores_of_process()
    of_all = f" of {cores}" if own < cores else ""
    free, total = memory_limit(torch.device("cpu"), 1), psutil.virtual_memory().total
    memory = f"{in_bytes(free)} of {in_bytes(total)} memory for this job"
    text = f"{own:.3g}{of_all} cores and {memory}; load {load:.1f}"
    if free < LITTLE_MEMORY:
        return warn(subject, text, "end other programs, or use a smaller --token-budget")
    # The load is that of all cores, also of those of other jobs.
    if load > 2 * cores:
        return warn(subject, text, "other programs use the cores: training will be slow")
    return ok(subject, text)


def shared_memory_finding(needed: int, path: Path) -> Finding:
    """Check /dev/shm: data workers pass batches to the training process in shared memory."""
    if not path.is_dir():
        return ok(str(path), "not on this system: shared memory is limited by memory only")
    free = shutil.disk_usage(path).free
    text = f"{in_bytes(free)} free, the loader needs {in_bytes(needed)}"
    remedy = "enlarge it (docker run --shm-size 8g), or train with --num-workers 0"
    return graded(str(path), text, remedy, free, needed, 2 * needed)


def shared_memory_needed(num_workers: int, token_budget: int | str, num_processes: int) -> int:
    """Bytes in shared memory between all data workers and processes of one machine."""
    tokens = token_budget if isinstance(token_budget, int) else TOKENS_OF_AUTO
    return tokens * BYTES_PER_TOKEN * BATCHES_PER_WORKER * num_workers * num_processes


def disk_finding(subject: str, path: Path) -> Finding:
    """Whether `path`, or its nearest existing parent, has free space and is writable."""
    folder = next(place for place in (path, *path.absolute().parents) if place.is_dir())
    if not os.access(folder, os.W_OK):
        return fail(subject, f"{folder} can't be written to", "give another --output-dir")
    free = shutil.disk_usage(folder).free
    remedy = "free disk space for checkpoints and upsampled files"
    text = f"{in_bytes(free)} free in {folder}"
    return graded(subject, text, remedy, free, NO_DISK, LITTLE_DISK)


def accelerators_finding() -> Finding:
    """Whether torch finds the accelerators of this machine."""
    subject, number = "accelerators", torch.accelerator.device_count()
    if number:
        kind = torch.accelerator.current_accelerator()
        return ok(subject, f"{number} of type {kind}, torch {torch.__version__}")
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    if is_hidden or shutil.which("nvidia-smi") is None:
        return ok(subject, "none: CPU")
    reason, _, remedy = why_no_accelerator().partition("; ")
    return fail(subject, reason, remedy or "install a build of torch for the driver's CUDA")


def device_findings(device: torch.device) -> Iterator[Finding]:
    """Check the memory of a device, a computation on it, and on CUDA the kernels."""
    if device.type == "cuda":
        yield memory_finding(device)
    compute = compute_finding(device)
    yield compute
    if device.type == "cuda" and compute.level == "ok":
        yield kernel_finding(device)


def memory_finding(device: torch.device) -> Finding:
    free, total = torch.cuda.mem_get_info(device)
    name = torch.cuda.get_device_name(device)
    text = f"{name}, {in_bytes(free)} of {in_bytes(total)} free"
    remedy = "another program uses its memory: `nvidia-smi` shows which"
    return graded(f"memory {device}", text, remedy, free, 0, (1 - SHARE_IN_USE) * total)


def compute_finding(device: torch.device) -> Finding:
    """Whether a device computes the correct product of two matrices."""
    subject = f"compute {device}"
    try:
        ones = torch.ones(256, 256, device=device)
        is_right = bool((ones @ ones == 256).all())
    except RuntimeError as error:
        remedy = "make sure that no other program holds it"
        return fail(subject, f"fails: {first_line(error)}", remedy)
    remedy = "its results are wrong: replace it"
    return ok(subject, "correct") if is_right else fail(subject, "wrong", remedy)


def kernel_finding(device: torch.device) -> Finding:
    """Whether every kernel compiles and gives correct results on a device."""
    subject, slow = f"kernels {device}", "searches are many times slower"
    if kernels.is_switched_off():
        text = f"switched off by {kernels.SWITCH}=0: {slow}"
        return warn(subject, text, f"unset {kernels.SWITCH}")
    began = time.perf_counter()
    try:
        problem = trial.problem(device)
    except (PointupError, RuntimeError) as error:
        return fail(subject, first_line(error), f"start the command again with {kernels.SWITCH}=0")
    if problem is not None:
        return warn(subject, f"{problem.text}: {slow}", problem.remedy)
    seconds = time.perf_counter() - began
    return ok(subject, f"correct; compiled or loaded from the cache, and tested in {seconds:.1f} s")


NUM_NAMED = 3
OLD_SECONDS = 600.0
"""Seconds without a new line of metrics after which a running training may hang."""


def run_findings(directory: Path) -> Iterator[Finding]:
    if not directory.is_dir():
        yield fail("run", f"{directory}: no such directory", "give the --output-dir of a run")
        return
    if readable_json(directory / "config.json"):
        yield ok("run", str(directory))
    else:
        what = f"{directory / 'config.json'} is missing, or not JSON"
        yield fail("run", what, "restore it, or train in another --output-dir")
    lock, is_training = lock_finding(directory / "lock")
    yield lock
    yield heartbeat_finding(directory / "metrics.jsonl", is_training)
    yield from checkpoint_findings(directory / "checkpoints")
    yield model_finding(directory / "model")


def lock_finding(path: Path) -> tuple[Finding, bool]:
    """The state of the lock, and whether the run is training now."""
    if not path.is_file() or not path.stat().st_size:
        return ok("lock", "free: the run is not training"), False
    holder, is_held = inspect_lock(path)
    who = "process {pid} on {host}, since {since}".format_map(holder) if holder else "a process"
    if is_held:
        return ok("lock", f"held by {who}: the run is training"), True
    remedy = "start the same command again: it takes over the lock, and continues the run"
    return warn("lock", f"stale: {who}, has ended without releasing it", remedy), False


def heartbeat_finding(path: Path, is_training: bool) -> Finding:
    """Check the last line of the metrics, and its age."""
    subject = "last heartbeat"
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        age = max(time.time() - path.stat().st_mtime, 0.0)
    except OSError:
        return warn(subject, "no metrics.jsonl yet", "start the training, or see logs/rank_0.log")
    # A truncated line is the last one of a killed run.
    records = [json.loads(line) for line in lines if line.endswith("}")]
    if not records:
        return warn(subject, "metrics.jsonl is empty", "see logs/rank_0.log")
    text = f"step {records[-1].get('step')}, {timedelta(seconds=round(age))} ago"
    losses = [record["loss"] for record in records if "loss" in record]
    is_finite = not losses or losses[-1] is not None
    if losses:
        text += f", loss {losses[-1]:.4g}" if is_finite else ", loss not finite"
    if is_training and age > OLD_SECONDS:
        return warn(subject, text, "--hang-timeout ends a hang; see logs/rank_N.log")
    if not is_finite:
        return warn(subject, text, "the log names the clouds; --debug names the operation")
    return ok(subject, text)


def checkpoint_findings(directory: Path) -> Iterator[Finding]:
    """Read and check every checkpoint. A damaged one fails if the run would continue from it."""
    subject, marker = "checkpoints", directory / LATEST
    latest, found = named_by(marker), checkpoint_directories(directory)
    yield from (checkpoint_finding(path, path.name == latest) for path in found)
    whole = whole_checkpoints(directory)
    if latest is None and not found:
        yield warn(subject, "none yet", "--save-every sets how often one is written")
    elif latest is None and whole:
        remedy = f"the same command continues from {whole[-1].name}, the newest intact one"
        yield warn(subject, f"{marker} names no checkpoint", remedy)
    elif latest is None or directory / latest not in found:
        text = f"{marker} names {latest or 'no checkpoint'}: missing"
        yield fail(subject, text, offer_instead_of(directory / (latest or LATEST)))
    for path in directory.glob(".step_*.part"):
        yield warn(subject, f"{path.name} is the rest of an interrupted save", "remove it")


def checkpoint_finding(path: Path, is_latest: bool) -> Finding:
    subject, mark = "checkpoint", ", LATEST" if is_latest else ""
    fault = fault_of(path)
    if not fault:
        files = json.loads((path / "state.json").read_text())["files"]
        damaged = damaged_files(path, files)
        fault = f"has a damaged {', '.join(damaged)}" if damaged else ""
    if not fault:
        size = sum((path / name).stat().st_size for name in FILES)
        return ok(subject, f"{path.name} is intact, {in_bytes(size)}{mark}")
    if is_latest:
        return fail(subject, f"{path.name}{mark}, {fault}", offer_instead_of(path))
    return warn(subject, f"{path.name} {fault}", f"remove {path}; no run continues from it")


def model_finding(directory: Path) -> Finding:
    path = directory / "model.safetensors"
    if not directory.is_dir():
        return warn("model", "none yet", "the first evaluation saves one")
    try:
        json.loads((directory / "config.json").read_text())
        with safe_open(path, "pt") as file:
            num_tensors = len(file.keys())
    except (OSError, ValueError, SafetensorError) as error:
        remedy = "the next better evaluation replaces it; the weights are in the checkpoints, too"
        return fail("model", f"{directory} can't be read: {first_line(error)}", remedy)
    return ok("model", f"{directory}, {num_tensors} tensors")


def data_findings(name: str, min_points: int, token_budget: int | str | None) -> Iterator[Finding]:
    """Check that a model that needs `min_points` points and a run with `token_budget` can use the
    samples; a budget of None grows to the largest pair."""
    inspect = f"`pointup inspect {name}` lists them"
    for split in ("train", "validation"):
        subject = f"data, {split}"
        try:
            samples = open_samples(name, split)
        except DataError as error:
            # What a run on this dataset alone ends with, in two parts: reason and remedy.
            reason, _, remedy = first_line(error).partition("; ")
            remedy = remedy or "`pointup prepare` makes datasets"
            yield fail(subject, f"training refuses {reason}", remedy)
            return
        bad = samples.bad_samples(min_points)
        tokens = samples.array("num_source").astype(np.int64) + samples.array("num_target")
        most = tokens.max()
        text = f"{len(samples):,} pairs, {tokens.sum():,} points, at most {most:,} in a pair"
        reasons = "; ".join(f"{sample.name}: {sample.reason}" for sample in bad[:NUM_NAMED])
        if len(bad) == len(samples):
            yield fail(subject, f"none of {text} can be used: {reasons}", inspect)
        elif bad:
            remedy = f"they are left out; {inspect}"
            yield warn(subject, f"{text}; {len(bad):,} bad: {reasons}", remedy)
        else:
            yield ok(subject, text)
        for note in notes_on_pairs(samples):
            yield warn(subject, note, f"see `pointup inspect {name}`")
        if isinstance(token_budget, int) and most > token_budget:
            largest = samples.names[int(tokens.argmax())]
            text = f"{largest} has {most:,} points, more than the token budget of"
            remedy = "give a larger --token-budget, or auto, or --crop"
            yield warn(subject, f"{text} {token_budget:,}", remedy)
