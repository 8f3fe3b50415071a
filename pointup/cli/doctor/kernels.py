"""The Triton kernels on a GPU: whether they work, and how fast against what the hardware can."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator

import torch

from pointup.cli.doctor.accelerators import ask_driver, parse_number
from pointup.cli.doctor.finding import Finding, fail, in_time, ok, reason_of, warn
from pointup.errors import PointupError
from pointup.geometry import kernels
from pointup.geometry.insertion_radii import insertion_radii
from pointup.geometry.kernels import trial
from pointup.geometry.neighbors import knn, nearest_both
from pointup.geometry.packed import ptr_from_sizes
from pointup.geometry.validity import assume_valid

CLOUDS = 8
POINTS_PER_CLOUD = 25_000
NEIGHBORS = 16
REPEATS = 5
INSTRUCTIONS_PER_PAIR = {8: 8.5, 9: 8.7, 10: 5.6}
"""Of the loop that searches the nearest point among all, compiled for a compute capability."""
LANES = 128
"""Instructions that a multiprocessor issues a cycle, times the threads of each, from sm_80 on."""
SLOW_SHARE = 0.2
"""Of the bound; other work of the search, and clocks below the highest, leave more than this."""


def kernel_finding(device: torch.device) -> Finding:
    """Whether each kernel compiles and is right on a device."""
    subject = f"kernels {device}"
    if kernels.is_switched_off():
        text = f"switched off by {kernels.SWITCH}=0: searches are many times slower"
        return warn(subject, text, f"unset {kernels.SWITCH}")
    began = time.perf_counter()
    try:
        problem = trial.problem(device)
    except (PointupError, RuntimeError) as error:
        return fail(subject, reason_of(error), f"start again with {kernels.SWITCH}=0")
    if problem is not None:
        text = f"{problem.text}: searches are many times slower"
        return warn(subject, text, problem.remedy)
    took = in_time(time.perf_counter() - began)
    return ok(subject, f"all right; compiled, or read from the cache, and tried in {took}")


def speed_findings(device: torch.device) -> Iterator[Finding]:
    """How long searches and thinning take, and the pairs a second against the bound."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.full((CLOUDS,), POINTS_PER_CLOUD)
    ptr, counts = ptr_from_sizes(sizes).to(device), (sizes // 2).to(device)
    # Surfaces: a coordinate of each point follows from the others.
    pos = torch.rand(int(sizes.sum()), 3, generator=generator)
    pos[:, 2] = 0.1 * torch.sin(9 * pos[:, 0])
    pos = pos.to(device)
    with assume_valid():
        seconds = duration(lambda: nearest_both(pos, ptr, pos.flip(0), ptr), device)
        rate = 2 * CLOUDS * POINTS_PER_CLOUD**2 / seconds
        yield pairs_finding(device, seconds, rate, pairs_bound(device))
        seconds = duration(lambda: knn(pos, ptr, NEIGHBORS), device)
        text = (
            f"{len(pos) / seconds:.2e} points/s: {NEIGHBORS} of {len(pos):,} in {in_time(seconds)}"
        )
        yield ok(f"neighbours {device}", text)
        seconds = duration(lambda: insertion_radii(pos, ptr, counts), device)
        text = f"{len(pos) / seconds:.2e} points/s: {len(pos):,} in {in_time(seconds)}"
        yield ok(f"thinning {device}", text)


def pairs_finding(
    device: torch.device, seconds: float, rate: float, bound: float | None
) -> Finding:
    subject = f"nearest {device}"
    text = f"{rate:.2e} pairs/s in {in_time(seconds)}"
    if bound is None:
        return ok(subject, f"{text}; the bound of the hardware is not known")
    text = f"{text}, {rate / bound:.0%} of what it can issue"
    if rate < SLOW_SHARE * bound:
        remedy = "see what else runs there, and `nvidia-smi -q -d PERFORMANCE` for its clocks"
        return warn(subject, text, remedy)
    return ok(subject, text)


def pairs_bound(device: torch.device) -> float | None:
    """Pairs a second at the highest clock of a GPU; None where it or the GPU's kind is unknown."""
    properties = torch.cuda.get_device_properties(device)
    try:
        lines = ask_driver("--query-gpu=name,clocks.max.sm", "--format=csv,noheader").splitlines()
    except (OSError, subprocess.SubprocessError):
        return None
    parts = [line.rpartition(",") for line in lines]
    # GPUs of one name have the same highest clock.
    clocks = {name.strip(): parse_number(mhz.strip()) for name, _, mhz in parts}
    megahertz = clocks.get(properties.name)
    instructions = INSTRUCTIONS_PER_PAIR.get(properties.major)
    if megahertz is None or instructions is None or torch.version.hip:
        return None
    lanes: int = properties.multi_processor_count * LANES
    return lanes * megahertz * 1e6 / instructions


def duration(work: Callable[[], object], device: torch.device) -> float:
    """Seconds that some work on a device takes, the best of some repeats after a first one."""
    seconds = []
    for _ in range(1 + REPEATS):
        torch.accelerator.synchronize(device)
        began = time.perf_counter()
        work()
        torch.accelerator.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])
