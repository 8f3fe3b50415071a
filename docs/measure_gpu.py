"""Measures on a GPU the open figures of docs/gpu.md, and prints them as tables for that page.

    python docs/measure_gpu.py [--device cpu] [--quick] [PART ...]

Parts: kernels, lidar, shapes, forest (steps of training), upsampling. Each takes less than 8
minutes; what does not fit is named. Needs torch, torch-geometric, accelerate, SciPy and fpsample,
not the packages for files and datasets.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from unittest.mock import MagicMock

import numpy as np
import torch
import torch_geometric  # noqa: F401
from torch.profiler import ProfilerActivity, profile

for name in ("datasets", "pyarrow"):
    if find_spec(name) is None:
        # Imported beside what is measured, and not called.
        sys.modules[name] = MagicMock()

from pointup.benchmark.machine import describe_machine, machine_lines
from pointup.benchmark.training_step import OneProcessGroup, TrainingWork, sheet, training_batch
from pointup.datasets.batch import num_tokens
from pointup.geometry.kernels import trial
from pointup.model.upsampler import Upsampler
from pointup.training.distributed.accelerator import now
from pointup.upsampling.in_memory import load_model, upsample

MODELS = ("lidar", "shapes", "forest")
SIZES = (500, 20_000, 200_000)
BUDGETS = (20_480, 60_000, 200_000, 600_000, 2_000_000)
LONGEST_PART = 400.0
"""Seconds after which a part begins no further row."""
STEPS = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default=None)
    parser.add_argument("--quick", action="store_true")
    parts: dict[str, Callable[[torch.device, bool], Iterator[str]]] = {"kernels": kernels}
    parts |= {name: training_of(name) for name in MODELS} | {"upsampling": upsampling}
    parser.add_argument("parts", nargs="*", choices=[[], *parts], metavar="PART")
    options = parser.parse_args()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None and options.device is None:
        print("measure_gpu.py: torch sees no accelerator; `pointup doctor` says why")
        return 1
    device = torch.device(options.device or f"{accelerator}:0")
    print("\n".join(machine_lines(describe_machine(device))))
    for name in options.parts or parts:
        print(f"\n{name}\n", flush=True)
        end = time.monotonic() + LONGEST_PART
        for row in parts[name](device, options.quick):
            print(row, flush=True)
            if time.monotonic() > end:
                print(f"\nstopped after {LONGEST_PART:.0f} s; rows that follow are not measured")
                break
    return 0


def kernels(device: torch.device, quick: bool) -> Iterator[str]:
    began = time.monotonic()
    problem = None if device.type == "cpu" else trial.problem(device)
    found = "none here" if device.type == "cpu" else problem.text if problem else "correct"
    yield f"kernels: {found}, compiled and tested in {time.monotonic() - began:.1f} s"


def training_of(name: str) -> Callable[[torch.device, bool], Iterator[str]]:
    """The part that measures training steps of an included model."""

    def rows(device: torch.device, quick: bool) -> Iterator[str]:
        yield "| precision | points | tokens | ms a step | tokens/s | launches | busy | B a token |"
        yield "|---|---:|---:|---:|---:|---:|---:|---:|"
        for budget in BUDGETS[:1] if quick else BUDGETS:
            for precision in ("bf16", "fp32"):
                work = TrainingWork(OneProcessGroup(device), precision, load_model(name, device))
                for size in SIZES:
                    if 5 * size <= budget:
                        yield step_row(work, precision, size, budget)

    return rows


def step_row(work: TrainingWork, precision: str, size: int, budget: int) -> str:
    """A row of the table, from steps without and with the profiler."""
    batch, device = training_batch([size] * max(1, budget // (5 * size))), work.device
    tokens, is_cuda = num_tokens(batch), device.type == "cuda"
    try:
        if is_cuda:
            torch.cuda.reset_peak_memory_stats(device)
        for _ in range(2):
            work.step(batch)
        start = now(device)
        for _ in range(STEPS):
            work.step(batch)
        seconds = (now(device) - start) / STEPS
    except torch.OutOfMemoryError:
        return f"| {precision} | {size:,} | {tokens:,} | out of memory | | | | |"
    launched = []
    if is_cuda:  # A profile of the CPU's many small blocks takes all memory.
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            work.step(batch)
            now(device)
        launched = [
            event
            for event in trace.events()
            if event.device_type.name != "CPU" and not event.is_user_annotation
        ]
    busy = sum(event.device_time for event in launched) / 1e6
    peak = torch.cuda.max_memory_allocated(device) if is_cuda else 0
    return (
        f"| {precision} | {size:,} | {tokens:,} | {1e3 * seconds:.1f} | {tokens / seconds:,.0f} "
        f"| {len(launched):,} | {busy / seconds:.0%} | {peak / tokens:,.0f} |"
    )


def upsampling(device: torch.device, quick: bool) -> Iterator[str]:
    yield "| model | points | device | new points/s |"
    yield "|---|---:|---|---:|"
    for size in (2_000,) if quick else (100_000, 1_000_000):
        for name in MODELS:
            for place in dict.fromkeys((device, torch.device("cpu"))):
                # The CPU of a large machine is the measure of a GPU.
                model: Upsampler = load_model(name, place)
                points = sheet(size, 0).double().numpy() * np.sqrt(size)
                upsample(points[:2000], ratio=4, model=model, device=place)
                start = now(place)
                made = upsample(points, ratio=4, model=model, device=place, only_new=True)
                rate = len(made) / (now(place) - start)
                yield f"| {name} | {size:,} | {place}, {os.cpu_count()} cores | {rate:,.0f} |"


if __name__ == "__main__":
    sys.exit(main())
