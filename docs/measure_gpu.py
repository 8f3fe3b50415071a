"""Measures on a GPU the open figures of docs/gpu.md, and prints them as tables for that page.

python docs/measure_gpu.py [--quick]
"""

from __future__ import annotations

import subprocess
import sys

import torch
from torch.profiler import ProfilerActivity, profile

from pointup.benchmark.machine import describe_machine, machine_lines
from pointup.benchmark.section import now
from pointup.benchmark.training_step import OneProcessGroup, TrainingWork, training_batch
from pointup.datasets.batch import num_tokens

SIZES = (500, 2000, 20_000, 200_000)
BUDGETS = (20_480, 200_000, 1_000_000)
STEPS = 10


def main() -> int:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        print("measure_gpu.py: torch sees no accelerator; `pointup doctor` says why")
        return 1
    device = torch.device(accelerator.type, 0)
    print("\n".join(machine_lines(describe_machine(device))))
    quick = "--quick" in sys.argv[1:]
    print("\n| precision | points | tokens a step | ms a step | tokens/s | launches | busy |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for precision in ("fp32", "bf16", "fp16"):
        work = TrainingWork(OneProcessGroup(device), precision)
        for budget in BUDGETS[:1] if quick else BUDGETS:
            for size in SIZES:
                if 5 * size <= budget:
                    print(measured(work, precision, size, budget), flush=True)
    options = ["--quick"] if quick else []
    command = [sys.executable, "-m", "pointup", "bench", "--device", str(device.type), *options]
    return subprocess.run(command, check=False).returncode


def measured(work: TrainingWork, precision: str, size: int, budget: int) -> str:
    """A row of the table, from steps without and with the profiler."""
    batch = training_batch([size] * max(1, budget // (5 * size)))
    for _ in range(3):
        work.step(batch)
    start = now(work.device)
    for _ in range(STEPS):
        work.step(batch)
    seconds = (now(work.device) - start) / STEPS
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        work.step(batch)
        now(work.device)
    kernels = [event for event in trace.events() if event.device_type.name != "CPU"]
    busy = sum(event.device_time for event in kernels) / 1e6
    tokens = num_tokens(batch)
    return (
        f"| {precision} | {size:,} | {tokens:,} | {1e3 * seconds:.1f} | {tokens / seconds:,.0f} "
        f"| {len(kernels):,} | {busy / seconds:.0%} |"
    )


if __name__ == "__main__":
    sys.exit(main())
