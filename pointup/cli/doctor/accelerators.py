"""Checks the accelerators of a machine: their state, a computation and the kernels on each."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations, takewhile

import torch

from pointup.cli.doctor.finding import Finding, fail, in_bytes, in_time, ok, reason_of, warn
from pointup.errors import PointupError
from pointup.geometry import kernels
from pointup.geometry.kernels import trial
from pointup.geometry.neighbors import knn, nearest_both
from pointup.geometry.packed import assume_valid, ptr_from_sizes
from pointup.geometry.thinning import insertion_radii

FIELDS = (
    "index", "name", "memory.total", "memory.used", "temperature.gpu",
    "ecc.errors.corrected.volatile.total", "ecc.errors.uncorrected.volatile.total",
)  # fmt: skip
HOT = 85
"""Temperature in degrees Celsius from which data centre GPUs throttle."""
SHARE_IN_USE = 0.1
SECONDS_FOR_DRIVER = 60
# The links in the output of `nvidia-smi topo -m`, from near to far.
LINKS = {
    "PIX": "one PCIe bridge",
    "PXB": "several PCIe bridges",
    "PHB": "PCIe and the processor",
    "NODE": "PCIe within one NUMA node",
    "SYS": "PCIe and the link between processors",
}


@dataclass(frozen=True)
class Gpu:
    """The state of a GPU by nvidia-smi: bytes, degrees Celsius, memory errors since driver start.

    None is a value that this GPU does not report.
    """

    index: int
    name: str
    memory: float | None = None
    memory_used: float | None = None
    temperature: float | None = None
    corrected_errors: float | None = None
    uncorrected_errors: float | None = None


def accelerator_findings() -> Iterator[Finding]:
    """Findings on all accelerators of this machine, by nvidia-smi if it is there, else by torch."""
    num_usable = torch.accelerator.device_count()
    if shutil.which("nvidia-smi") is None:
        kind = torch.accelerator.current_accelerator()
        text = (
            f"{num_usable} of type {kind}; nvidia-smi is not installed"
            if num_usable
            else "none: CPU"
        )
        yield ok("accelerators", text)
        return
    try:
        gpus = parse_gpus(ask_driver(f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader"))
        topology = ask_driver("topo", "-m") if len(gpus) > 1 else ""
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        message = " ".join((getattr(error, "stdout", None) or str(error)).split())
        found = fail if torch.version.cuda else warn
        yield found("accelerators", f"nvidia-smi: {message}", "reload the driver, or reboot")
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    yield usable_finding(len(gpus), num_usable, visible)
    for gpu in gpus:
        yield gpu_finding(gpu)
    if topology:
        yield topology_finding(topology)


def ask_driver(*arguments: str) -> str:
    command = ["nvidia-smi", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=SECONDS_FOR_DRIVER
    ).stdout


def parse_gpus(text: str) -> list[Gpu]:
    """Parse the output of `nvidia-smi --query-gpu=... --format=csv,noheader`, with units.

    Raises ValueError for a line of another form.
    """
    gpus = []
    for line in filter(None, map(str.strip, text.splitlines())):
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(FIELDS):
            raise ValueError(line)
        index, name, *numbers = cells
        memory, used, *rest = map(parse_number, numbers)
        memory, used = (None if m is None else m * 2**20 for m in (memory, used))
        gpus.append(Gpu(int(index), name, memory, used, *rest))
    return gpus


def parse_number(cell: str) -> float | None:
    """A number with or without a unit; None for `[N/A]`, `[Not Supported]` and the like."""
    number = re.match(r"\d+(\.\d+)?", cell)
    return float(number[0]) if number else None


def gpu_finding(gpu: Gpu) -> Finding:
    subject, parts = f"GPU {gpu.index}", [gpu.name]
    if gpu.memory is not None and gpu.memory_used is not None:
        free = in_bytes(gpu.memory - gpu.memory_used)
        parts.append(f"{free} of {in_bytes(gpu.memory)} free")
    if gpu.temperature is not None:
        parts.append(f"{gpu.temperature:.0f} °C")
    if gpu.uncorrected_errors is not None:
        corrected = f"{gpu.corrected_errors or 0:.0f} corrected"
        parts.append(f"memory errors: {corrected}, {gpu.uncorrected_errors:.0f} not")
    text = ", ".join(parts)
    if gpu.uncorrected_errors:
        return fail(
            subject, text, "results can be wrong: reset the GPU; if errors return, replace it"
        )
    if gpu.temperature is not None and gpu.temperature >= HOT:
        return warn(subject, text, "it throttles when hot: check its cooling")
    if gpu.memory and gpu.memory_used and gpu.memory_used > SHARE_IN_USE * gpu.memory:
        return warn(subject, text, "another program uses its memory: `nvidia-smi` shows which")
    return ok(subject, text)


def usable_finding(num_gpus: int, num_usable: int, visible: str | None) -> Finding:
    """Whether torch finds all GPUs of the driver, or those that CUDA_VISIBLE_DEVICES names."""
    text = f"{num_gpus} found by the driver, {num_usable} by torch {torch.__version__}"
    num_wanted = num_gpus
    if visible is not None:
        text += f" (CUDA_VISIBLE_DEVICES={visible})"
        num_wanted = _num_named(visible)
    if num_usable == 0 and num_wanted:
        remedy = "install a build of torch for the driver's CUDA: https://pytorch.org"
        if visible is not None:
            remedy += "; CUDA_VISIBLE_DEVICES must name GPUs that `nvidia-smi -L` lists"
        return fail("accelerators", text, remedy)
    if num_usable < num_wanted:
        return warn("accelerators", text, "`nvidia-smi -L` lists all; compare")
    return ok("accelerators", text)


def _num_named(visible: str) -> int:
    """The number of GPUs in CUDA_VISIBLE_DEVICES, whose first entry that is none ends the list."""
    entries = map(str.strip, visible.split(","))
    return sum(1 for _ in takewhile(re.compile(r"\d+$|GPU-|MIG-").match, entries))


def topology_finding(text: str) -> Finding:
    """The links between all pairs of GPUs, from the matrix that `nvidia-smi topo -m` prints."""
    lines = [re.sub(r"\x1b\[\d*m", "", line).split() for line in text.splitlines()]
    # Rows and the header start with the name of a GPU; only rows contain an X, for the GPU itself.
    rows = [line for line in lines if line and re.fullmatch(r"GPU\d+", line[0]) and "X" in line]
    links = Counter(rows[i][1 + j] for i, j in combinations(range(len(rows)), 2))
    if not links:
        return warn("links", "not reported by nvidia-smi", "check `nvidia-smi topo -m`")
    if len(links) == 1:
        return ok("links", f"{explain(next(iter(links)))} between all {len(rows)} GPUs")
    counts = [f"{explain(link)} between {n}" for link, n in links.most_common()]
    return ok("links", f"{', '.join(counts)} of {links.total()} pairs of GPUs")


def explain(link: str) -> str:
    if re.fullmatch(r"NV\d+", link):
        return f"NVLink of {link[2:]} lanes"
    return f"{LINKS[link]} ({link})" if link in LINKS else link


def compute_finding(device: torch.device) -> Finding:
    """Whether a device computes the correct product of two matrices."""
    subject = f"compute {device}"
    try:
        ones = torch.ones(256, 256, device=device)
        is_right = bool((ones @ ones == 256).all())
    except RuntimeError as error:
        return fail(
            subject,
            f"fails: {reason_of(error)}",
            "make sure that no other program holds it",
        )
    remedy = "its results are wrong: replace it"
    return ok(subject, "correct") if is_right else fail(subject, "wrong", remedy)


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
