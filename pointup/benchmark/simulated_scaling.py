"""Benchmark section: training on any number of processes, simulated, beside real groups of a few.

`pointup bench --only scaling --simulate 1024`.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist

from pointup.benchmark.clouds import RATIO, training_batch
from pointup.benchmark.optimizer_steps import TrainingWork
from pointup.benchmark.simulation import ReductionTimes, StepTimes, simulate
from pointup.benchmark.tables import Column, Row, Section
from pointup.benchmark.timing import Effort
from pointup.datasets.sampler import TokenBudgetBatchSampler
from pointup.training.distributed.accelerator import make_accelerator
from pointup.training.faults.out_of_memory import num_tokens

MEASURED = (1, 2, 4)
"""Numbers of processes of the real groups."""
BUDGET = 20_000
STEPS, QUICK_STEPS = 16, 4
SAMPLES_PER_PROCESS = 400
REDUCTIONS = 20


def sizes_of_sources(num_samples: int) -> np.ndarray:
    """Source points (n,) of random pairs, whose tokens fit into the budget."""
    sizes = np.exp(np.random.default_rng(0).normal(6.5, 0.7, num_samples)) + 50
    return np.minimum(sizes, BUDGET / (1 + RATIO) - 1).astype(np.int64)


def loads_of(num_processes: int) -> np.ndarray:
    """Tokens (num_steps, P) of an epoch of `SAMPLES_PER_PROCESS` random pairs for each process."""
    sampler = _sampler(num_processes, SAMPLES_PER_PROCESS * num_processes)
    return sampler.plan.loads(sampler.sizes)


def _sampler(num_processes: int, num_samples: int) -> TokenBudgetBatchSampler:
    sizes = sizes_of_sources(num_samples)
    tokens = sizes + np.round(RATIO * sizes).astype(np.int64)
    return TokenBudgetBatchSampler(tokens, BUDGET, num_processes=num_processes)


def measure(effort: Effort) -> Iterator[Row]:
    """Rows of real groups with what is predicted for them, then of simulated ones."""
    assert effort.simulate is not None
    bound = effort.bound()
    steps = QUICK_STEPS if effort.quick else STEPS
    cores = psutil.cpu_count() or 1
    groups: dict[int, list[dict[str, Any]]] = {}
    took = 0.0
    for number in MEASURED:
        if number > max(2, effort.simulate) or (number > 2 and bound.refusal(2 * took)):
            continue
        began = time.monotonic()
        groups[number] = run_group(number, steps)
        took = time.monotonic() - began
    step_times, reduction = fitted(groups)
    for number, group in groups.items():
        predicted = simulate(loads_of_group(group), step_times, reduction, cores=cores)
        yield {
            "processes": number,
            **as_row(predicted.steps_per_second, predicted.idle, predicted.reduction),
            "tokens": predicted.tokens_per_second,
            **{f"real_{name}": value for name, value in as_row(*observed(group)).items()},
        }
    number = 8
    while number <= effort.simulate:
        predicted = simulate(loads_of(number), step_times, reduction, per_machine=cores)
        yield {
            "processes": number,
            **as_row(predicted.steps_per_second, predicted.idle, predicted.reduction),
            "tokens": predicted.tokens_per_second,
        }
        number = min(8 * number, effort.simulate) if number < effort.simulate else number + 1


def as_row(steps_per_second: float, idle: float, reduction: float) -> Row:
    return {"steps": steps_per_second, "idle": idle, "reduction": 1000 * reduction}


def fitted(groups: dict[int, list[dict[str, Any]]]) -> tuple[StepTimes, ReductionTimes]:
    """Step times from the groups of one process and of two, reduction times from that of two."""
    alone, two = groups[1][0], groups[2]
    update = float(np.median(np.subtract(alone["wall"], alone["busy"])))
    steps = StepTimes.fitted(
        np.array(alone["tokens"]),
        np.array(alone["busy"]),
        max(update, 0.0),
        loads_of_group(two),
        np.array([process["busy"] for process in two]).T,
    )
    small, large = (
        float(np.median(np.min([process[name] for process in two], axis=0)))
        for name in ("small_reductions", "reductions")
    )
    return steps, ReductionTimes.fitted(small, large, 2)


def loads_of_group(group: list[dict[str, Any]]) -> np.ndarray:
    """Tokens (num_steps, P) of the steps that a real group took."""
    return np.array([process["tokens"] for process in group]).T


def observed(group: list[dict[str, Any]]) -> tuple[float, float, float]:
    """Steps per second, idle share and seconds of a reduction of a real group.

    The reduction is timed on its own: in a step it includes waiting for the slowest process.
    """
    busy = np.array([process["busy"] for process in group])
    seconds = float(np.sum(group[0]["wall"]))
    reductions = np.min([process["reductions"] for process in group], axis=0)
    idle = float(1 - busy.sum() / (busy.max(axis=0).sum() * len(group)))
    return len(busy[0]) / seconds, idle, float(np.median(reductions)) if len(group) > 1 else 0.0


def run_group(num_processes: int, steps: int) -> list[dict[str, Any]]:
    """Train a few steps in a group over gloo; returns what each process measured."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    with TemporaryDirectory(prefix="pointup_") as directory:
        torch.multiprocessing.spawn(
            work_in_group, (num_processes, port, directory, steps), nprocs=num_processes
        )
        files = [Path(directory) / f"{rank}.json" for rank in range(num_processes)]
        return [json.loads(file.read_text()) for file in files]


def work_in_group(rank: int, num_processes: int, port: int, directory: str, steps: int) -> None:
    """A process of the group: times its steps, then the reduction alone."""
    torch.set_num_threads(1)
    os.environ |= {
        "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_processes),
        "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip
    accelerator = make_accelerator(Path(directory))
    training = TrainingWork(accelerator)
    sizes = sizes_of_sources(SAMPLES_PER_PROCESS * num_processes)
    plan = _sampler(num_processes, len(sizes)).plan
    batches = [
        training_batch(sizes[plan.batch(step, rank)].tolist(), seed=1000 * rank + step)
        for step in range(min(steps, plan.num_steps))
    ]
    training.step(batches[0])
    measured: dict[str, Any] = {"tokens": list(map(num_tokens, batches)), "busy": [], "wall": []}
    for batch in batches:
        if num_processes > 1:
            dist.barrier()
        began = time.perf_counter()
        totals = training.step(batch)
        measured["wall"].append(time.perf_counter() - began)
        measured["busy"].append(totals.busy_seconds[rank])
    for name, buffer in (
        ("reductions", training.reduction.buffer), ("small_reductions", torch.zeros(1)),
    ):  # fmt: skip
        measured[name] = []
        for _ in range(REDUCTIONS if num_processes > 1 else 0):
            dist.barrier()
            began = time.perf_counter()
            accelerator.reduce(buffer, reduction="sum")
            measured[name].append(time.perf_counter() - began)
    (Path(directory) / f"{rank}.json").write_text(json.dumps(measured))
    if num_processes > 1:
        dist.destroy_process_group()


SECTION = Section(
    "scaling",
    f"Training on many processes, simulated; {BUDGET:,} tokens each; real: groups over gloo",
    (
        Column("processes", "processes", ",", is_key=True),
        Column("steps", "steps/s", ".3f"),
        Column("real_steps", "real", ".3f"),
        Column("tokens", "tokens/s", ",.0f", width=11),
        Column("idle", "idle", ".2%"),
        Column("real_idle", "real", ".2%"),
        Column("reduction", "reduction, ms", ".2f"),
        Column("real_reduction", "real, ms", ".2f"),
    ),
    measure,
    note="Assumed: a step takes a + b * tokens, with the spread of the steps of one process here.\n"
    "What two processes here have in common in a step, all processes of a machine have. All wait\n"
    "for the slowest; the reduction sends 2 * (P - 1) / P times the buffer in 2 * log2(P) rounds,\n"
    "as measured between two processes here. Up to 4 share the cores of this machine; more have\n"
    "one each, on machines with as many cores as this one. Data workers keep up.",
)
