"""Benchmark of training steps: tokens per second by cloud size and precision."""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median

import torch

from pointup.benchmark.clouds import RATIO, training_batch
from pointup.benchmark.optimizer_steps import PARTS, SingleProcess, TrainingWork
from pointup.benchmark.peak_memory import PeakMemory
from pointup.benchmark.tables import Column, Row, Section
from pointup.benchmark.timing import MOST_ROUNDS, Effort
from pointup.datasets.batch import move
from pointup.training.faults.out_of_memory import num_tokens

QUICK_SIZES = (500, 2000, 5000)
SIZES = (500, 2000, 5000, 20_000, 50_000, 200_000)


def token_budget(device: torch.device) -> int:
    """Tokens of a step of small clouds, enough to use the device fully."""
    return 20_000 if device.type == "cpu" else 1_000_000


def measure(effort: Effort) -> Iterator[Row]:
    bound = effort.bound()
    precisions = ("fp32", "bf16", "fp16") if effort.device.type != "cpu" else ("fp32", "bf16")
    works = [TrainingWork(SingleProcess(effort.device), precision) for precision in precisions]
    seconds_per_token = dict.fromkeys(precisions, 0.0)
    sizes = QUICK_SIZES if effort.quick else SIZES
    budget = token_budget(effort.device) // (2 if effort.quick else 1)
    for number, size in enumerate(sizes):
        num_clouds = max(1, round(budget / ((1 + RATIO) * size)))
        batch = move(training_batch([size] * num_clouds), effort.device)
        for precision, work in zip(precisions, works, strict=True):
            row: Row = {"precision": precision, "size": size, "clouds": num_clouds}
            expected = 2 * seconds_per_token[precision] * num_tokens(batch)
            if refusal := bound.refusal(expected):
                yield row | {"left_out": refusal}
                continue
            # An equal part of the time left for all sizes and precisions.
            row |= time_steps(work, batch, bound.left / (len(precisions) * (len(sizes) - number)))
            seconds_per_token[precision] = 1 / row["step"]
            yield row


def time_steps(work: TrainingWork, batch: object, seconds: float) -> Row:
    """Tokens per second of the parts of a step, as medians of steps within about `seconds`, and
    peak memory of the first step."""
    began = time.perf_counter()
    with PeakMemory(work.device) as memory:
        work.step(batch)
    rounds: list[dict[str, float]] = []
    while len(rounds) < MOST_ROUNDS:
        work.step(batch)
        rounds.append(work.seconds)
        passed = time.perf_counter() - began
        if passed * (len(rounds) + 2) / (len(rounds) + 1) > seconds:
            break
    parts = {part: median(step[part] for step in rounds) for part in PARTS}
    tokens = num_tokens(batch)
    return {
        "tokens": tokens,
        "forward": tokens / parts["forward"],
        "loss": tokens / parts["loss"],
        "backward": tokens / parts["backward"],
        "step": tokens / median(sum(step.values()) for step in rounds),
        "memory": memory.bytes / tokens,
        "rounds": len(rounds),
    }


SECTION = Section(
    "step",
    "Training steps of the default model, tokens/s (a token is a point of source or target)",
    (
        Column("precision", "precision", is_key=True),
        Column("size", "points", ",", is_key=True),
        Column("clouds", "clouds", ","),
        Column("tokens", "tokens", ","),
        Column("forward", "forward", ",.0f", "higher"),
        Column("loss", "loss", ",.0f", "higher"),
        Column("backward", "backward", ",.0f", "higher"),
        Column("step", "step", ",.0f", "higher"),
        Column("memory", "bytes/token", ",.0f", "lower"),
    ),
    measure,
    note="points: per source; targets have four times as many. bytes/token: peak memory.",
)
