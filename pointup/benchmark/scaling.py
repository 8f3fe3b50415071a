"""Benchmark of training on several processes against one, with the time that processes wait."""

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
from pointup.benchmark.optimizer_steps import SingleProcess, TrainingWork
from pointup.benchmark.tables import Column, Row, Section
from pointup.benchmark.timing import Effort
from pointup.benchmark.training_speed import token_budget
from pointup.datasets.sampler import TokenBudgetBatchSampler
from pointup.training.distributed.accelerator import make_accelerator
from pointup.training.faults.out_of_memory import num_tokens

MOST_PROCESSES = 8
BUDGETS = 6
"""Size of a step on CPU cores, in token budgets of small steps: in shorter steps the noise of the
machine exceeds the effect."""


def measure(effort: Effort) -> Iterator[Row]:
    """One row for each of 2, 4, ... processes, on GPUs where there are several, or on CPU cores."""
    on_gpus = effort.device.type != "cpu" and torch.accelerator.device_count() > 1
    most = torch.accelerator.device_count() if on_gpus else psutil.cpu_count(logical=False) or 1
    num_processes = 2
    if most < num_processes:
        yield {"processes": 2, "left_out": "this machine has one CPU core"}
    while num_processes <= min(most, MOST_PROCESSES):
        rounds, budgets = (1, BUDGETS // 3) if effort.quick else (3, BUDGETS)
        device = effort.device if on_gpus else torch.device("cpu")
        budget = token_budget(device) * (1 if on_gpus else budgets)
        yield summary(run_group(num_processes, on_gpus, budget, 3, rounds))
        num_processes *= 2


def run_group(
    num_processes: int, on_gpus: bool, budget: int, steps: int, rounds: int
) -> list[dict[str, Any]]:
    """Start a group of processes and return the measurements of each."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    with TemporaryDirectory(prefix="pointup_") as directory:
        torch.multiprocessing.spawn(
            work_in_group,
            (num_processes, port, directory, on_gpus, budget, steps, rounds),
            nprocs=num_processes,
        )
        files = [Path(directory) / f"{rank}.json" for rank in range(num_processes)]
        return [json.loads(file.read_text()) for file in files]


def work_in_group(
    rank: int,
    num_processes: int,
    port: int,
    directory: str,
    on_gpus: bool,
    budget: int,
    steps: int,
    rounds: int,
) -> None:
    """A process of the group. Each round has `steps` steps of the first process alone while the
    others wait, then of all processes, then of all on equal batches."""
    torch.set_num_threads(1)
    os.environ |= {
        "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_processes),
        "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": str(not on_gpus).lower(),
    }  # fmt: skip
    accelerator = make_accelerator(Path(directory))
    device = accelerator.device
    alone, together = TrainingWork(SingleProcess(device)), TrainingWork(accelerator)
    tokens, sizes = samples_for(budget * num_processes * steps, budget)

    def batches(slots: int, slot: int) -> list[Any]:
        plan = TokenBudgetBatchSampler(tokens, budget, num_processes=slots).plan
        return [
            training_batch(sizes[plan.batch(step, slot)].tolist(), seed=1000 * slot + step)
            for step in range(steps)
        ]

    of_one, of_all = batches(1, 0), batches(num_processes, rank)
    the_same = of_all if rank == 0 else batches(num_processes, 0)
    work = [(alone, of_one)] if rank == 0 else []
    measured: dict[str, Any] = {"tokens_alone": sum(map(num_tokens, of_one))}
    measured |= {"alone": [], "together": [], "busy": [], "cpu": [], "tokens": [], "same": []}
    together.step(of_all[0])
    for trainer, own in work:
        trainer.step(own[0])
    for _ in range(rounds):
        dist.barrier()
        for trainer, own in work:
            start = time.perf_counter()
            for batch in own:
                trainer.step(batch)
            measured["alone"].append(time.perf_counter() - start)
        dist.barrier()
        start = time.perf_counter()
        for batch in of_all:
            cpu = time.process_time()
            totals = together.step(batch)
            measured["cpu"].append(time.process_time() - cpu)
            measured["busy"].append(totals.busy_seconds)
            measured["tokens"].append(totals.num_tokens)
        measured["together"].append(time.perf_counter() - start)
        measured["same"] += [together.step(batch).busy_seconds for batch in the_same]
    (Path(directory) / f"{rank}.json").write_text(json.dumps(measured))
    dist.destroy_process_group()


def samples_for(num_tokens: int, budget: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and source points of clouds, twice as many as steps of `num_tokens` in all need."""
    rng = np.random.default_rng(0)
    mean = (1 + RATIO) * (np.exp(6.5 + 0.7**2 / 2) + 50)
    sizes = np.exp(rng.normal(6.5, 0.7, 2 * round(num_tokens / mean) + 100)) + 50
    sizes = np.minimum(sizes, budget / (2 * (1 + RATIO))).astype(np.int64)
    return sizes + np.round(RATIO * sizes).astype(np.int64), sizes


def summary(measured: list[dict[str, Any]]) -> Row:
    first = measured[0]
    rounds = len(first["together"])
    alone = first["tokens_alone"] / np.median(first["alone"])
    together = sum(first["tokens"]) / rounds / np.median(first["together"])
    return {
        "processes": len(measured),
        "alone": float(alone),
        "together": float(together),
        "speedup": float(together / alone),
        "idle": idle(np.array(first["busy"])),
        "idle_cpu": idle(np.array([process["cpu"] for process in measured]).T),
        "idle_same": idle(np.array(first["same"])),
    }


def idle(seconds: np.ndarray) -> float:
    """Share of the time spent waiting for the slowest process, from seconds (steps, processes)."""
    return float(1 - seconds.sum() / (seconds.max(1).sum() * seconds.shape[1]))


SECTION = Section(
    "scaling",
    "Training on several processes of one thread each, tokens/s",
    (
        Column("processes", "processes", is_key=True),
        Column("alone", "one process", ",.0f", "higher"),
        Column("together", "all processes", ",.0f", "higher"),
        Column("speedup", "times as fast", ".2f", "higher"),
        Column("idle", "idle, measured", ".2%", "lower"),
        Column("idle_cpu", "idle by CPU time", ".2%", "lower"),
        Column("idle_same", "with equal work", ".2%"),
    ),
    measure,
    note="One process and all processes take turns. Idle: share of the time spent waiting for the\n"
    "slowest process. By CPU time: without the effect of other programs on the machine. With\n"
    "equal work: all processes have the same batches, so that only the machine causes waiting.",
)
