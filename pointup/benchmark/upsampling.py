"""Benchmark of `pointup.upsample` on clouds in memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from pointup.benchmark.clouds import RATIO, sheet
from pointup.benchmark.peak_memory import PeakMemory
from pointup.benchmark.tables import Column, Row, Section
from pointup.benchmark.timing import Effort, now
from pointup.model.upsampler import Upsampler
from pointup.upsampling import upsample

QUICK_SIZES = (5000, 20_000)
SIZES = (10_000, 100_000, 1_000_000)


def measure(effort: Effort) -> Iterator[Row]:
    bound = effort.bound()
    torch.manual_seed(0)
    model = Upsampler().to(effort.device)
    seconds_per_point = 0.0
    for num_points in QUICK_SIZES if effort.quick else SIZES:
        row: Row = {"points": num_points, "made": round((RATIO - 1) * num_points)}
        expected = seconds_per_point * num_points
        if refusal := bound.refusal(expected):
            yield row | {"left_out": refusal}
            continue
        # Map coordinates in metres, about 20 points/m2.
        width = (num_points / 20) ** 0.5
        points = sheet(num_points, 0).double().numpy() * width + np.array([500_000.0, 4.1e6, 0.0])
        start = now(effort.device)
        with PeakMemory(effort.device) as memory:
            upsample(points, RATIO, model=model, device=effort.device)
        seconds = now(effort.device) - start
        seconds_per_point = seconds / num_points
        rate = row["made"] / seconds
        yield row | {
            "seconds": seconds,
            "rate": rate,
            "memory": memory.bytes / 1e6,
        }


SECTION = Section(
    "upsampling",
    f"Upsampling by {RATIO:g} with the default model",
    (
        Column("points", "points", ",", is_key=True),
        Column("made", "new points", ","),
        Column("seconds", "seconds", ".1f", "lower"),
        Column("rate", "new points/s", ",.0f", "higher"),
        Column("memory", "peak MB", ",.0f", "lower"),
    ),
    measure,
)
