"""Checks the Triton kernels on a GPU: correct results, and speed against the hardware bound."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator

import torch

from pointup.cli.doctor.accelerators import ask_driver, parse_number
from pointup.cli.doctor.finding import Finding, fail, in_time, ok, reason_of, warn
from pointup.errors import PointupError
from pointup.geometry import kernels
from pointup.geometry.kernels import trial
from pointup.geometry.neighbors import knn, nearest_both
from pointup.geometry.packed import assume_valid, ptr_from_sizes
from pointup.geometry.thinning import insertion_radii

CLOUDS = 8
POINTS_PER_CLOUD = 25_000
NEIGHBORS = 16
REPEATS = 5
INSTRUCTIONS_PER_PAIR = {8: 8.5, 9: 8.7, 10: 5.6}
"""Instructions for each pair in the loop of the nearest-neighbour search, by compute capability."""
LANES = 128
"""Instructions issued by a multiprocessor in a cycle times threads of each, from sm_80 on."""
FLOAT32_BOUND = {(8, 0): 64 / 6.0}
"""Pairs for each multiprocessor and cycle, by compute capability, where float32 is the bound: the
A100 has 64 lanes of float32 for 6.0 such instructions a pair."""
SLOW_SHARE = 0.2
"""Share of the bound below which a search is slow. Other work of the search and clocks below the
highest still leave more than this."""


def kernel_finding(device: torch.device) -> Finding:
    """Whether every kernel compiles and gives correct results on a device."""
    subject = f"kernels {device}"
    if kernels.is_switched_off():
        text = f"switched off by {kernels.SWITCH}=0: searches are many times slower"
        return warn(subject, text, f"unset {kernels.SWITCH}")
    began = time.perf_counter()
    try:
        problem = trial.problem(device)
    except (PointupError, RuntimeError) as error:
        return fail(subject, reason_of(error), f"start the command again with {kernels.SWITCH}=0")
    if problem is not None:
        text = f"{problem.text}: searches are many times slower"
        return warn(subject, text, problem.remedy)
    took = in_time(time.perf_counter() - began)
    return ok(subject, f"correct; compiled or loaded from the cache, and tested in {took}")


def speed_findings(device: torch.device) -> Iterator[Finding]:
    """Speed of neighbour searches and thinning; pairs per second against the hardware bound."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.full((CLOUDS,), POINTS_PER_CLOUD)
    ptr, counts = ptr_from_sizes(sizes).to(device), (sizes // 2).to(device)
    # Points on surfaces: z is a function of x.
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
        return ok(subject, f"{text}; the hardware bound is not known")
    text = f"{text}, {rate / bound:.0%} of the hardware bound"
    if rate < SLOW_SHARE * bound:
        remedy = "check for other programs on it, and its clocks by `nvidia-smi -q -d PERFORMANCE`"
        return warn(subject, text, remedy)
    return ok(subject, text)


def pairs_bound(device: torch.device) -> float | None:
    """Pairs per second at the highest clock of a GPU; None if clock or generation is unknown."""
    properties = torch.cuda.get_device_properties(device)
    try:
        lines = ask_driver("--query-gpu=name,clocks.max.sm", "--format=csv,noheader").splitlines()
    except (OSError, subprocess.SubprocessError):
        return None
    parts = [line.rpartition(",") for line in lines]
    # GPUs of the same name have the same highest clock.
    clocks = {name.strip(): parse_number(mhz.strip()) for name, _, mhz in parts}
    megahertz = clocks.get(properties.name)
    pairs = pairs_per_cycle(properties.major, properties.minor)
    if megahertz is None or pairs is None or torch.version.hip:
        return None
    return float(properties.multi_processor_count * megahertz * 1e6 * pairs)


def pairs_per_cycle(major: int, minor: int) -> float | None:
    """Pairs that a multiprocessor compares in a cycle at most; None for an unknown capability."""
    instructions = INSTRUCTIONS_PER_PAIR.get(major)
    if instructions is None:
        return None
    return FLOAT32_BOUND.get((major, minor), LANES / instructions)


def duration(work: Callable[[], object], device: torch.device) -> float:
    """Seconds that `work` takes on a device: the minimum of some repeats, after a warm-up."""
    seconds = []
    for _ in range(1 + REPEATS):
        torch.accelerator.synchronize(device)
        began = time.perf_counter()
        work()
        torch.accelerator.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])
