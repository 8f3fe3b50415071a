"""Benchmark of neighbour search, Chamfer distance and thinning against brute force."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from pointup.benchmark.clouds import ragged
from pointup.benchmark.reference_training import (
    reference_chamfer_distance,
    reference_farthest_point_sample,
    reference_knn,
)
from pointup.benchmark.tables import Column, Row, Section
from pointup.benchmark.timing import Effort, compare
from pointup.geometry.neighbors import knn
from pointup.geometry.packed import sizes_from_ptr
from pointup.geometry.thinning import farthest_point_sample
from pointup.losses import chamfer_distance

QUICK_POINTS = 5000
POINTS = 50_000
CLOUDS = 8
NEIGHBORS = 16
FAR = 0.05


def measure(effort: Effort) -> Iterator[Row]:
    bound = effort.bound()
    num_points = QUICK_POINTS if effort.quick else POINTS
    searches = (
        knn_search(num_points, effort.device),
        chamfer_search(num_points, effort.device, noise=0.0),
        chamfer_search(num_points, effort.device, noise=FAR),
        thinning(num_points, effort.device),
    )
    for number, (row, ours, brute_force) in enumerate(searches):
        seconds = bound.left / (len(searches) - number)
        fast, slow = compare(ours, brute_force, seconds, effort.device)
        yield row | {"seconds": fast, "brute_force": slow, "ratio": slow / fast}


Search = tuple[Row, Callable[[], object], Callable[[], object]]


def knn_search(num_points: int, device: torch.device) -> Search:
    pos, ptr = (values.to(device) for values in ragged(num_points, CLOUDS, 0))

    def brute_force() -> None:
        for cloud in clouds(pos, ptr):
            reference_knn(cloud, NEIGHBORS)

    row: Row = {"work": f"kNN, k = {NEIGHBORS}", "size": f"{num_points:,}"}
    return row, lambda: knn(pos, ptr, NEIGHBORS), brute_force


def chamfer_search(num_points: int, device: torch.device, noise: float) -> Search:
    """Chamfer distance, forward and backward, from points near the target (as after training) or
    `noise` away from it."""
    pos, ptr = (values.to(device) for values in ragged(num_points, CLOUDS, 0, noise))
    target, target_ptr = (values.to(device) for values in ragged(4 * num_points, CLOUDS, 100))
    pos.requires_grad_()

    def ours() -> None:
        chamfer_distance(pos, ptr, target, target_ptr).sum().backward()

    def brute_force() -> None:
        pairs = zip(clouds(pos, ptr), clouds(target, target_ptr), strict=True)
        for cloud, others in pairs:
            reference_chamfer_distance(cloud, others).backward()

    where = "Chamfer, far" if noise else "Chamfer, near"
    row: Row = {"work": where, "size": f"{num_points:,} to {len(target):,}"}
    return row, ours, brute_force


def thinning(num_points: int, device: torch.device) -> Search:
    pos, ptr = (values.to(device) for values in ragged(num_points, CLOUDS, 0))
    num_samples = sizes_from_ptr(ptr) // 4

    def brute_force() -> None:
        for cloud, count in zip(clouds(pos, ptr), num_samples.tolist(), strict=True):
            reference_farthest_point_sample(cloud, count)

    row: Row = {"work": "thinning", "size": f"{num_points:,} to {int(num_samples.sum()):,}"}
    return row, lambda: farthest_point_sample(pos, ptr, num_samples), brute_force


def clouds(pos: Tensor, ptr: Tensor) -> tuple[Tensor, ...]:
    return pos.split(sizes_from_ptr(ptr).tolist())


SECTION = Section(
    "knn",
    f"Searches in {CLOUDS} clouds of sizes 1 : 2 : ... : {CLOUDS}, against brute force",
    (
        Column("work", "what", is_key=True, width=13),
        Column("size", "points in all", is_key=True, width=17),
        Column("seconds", "seconds", ".3f", "lower"),
        Column("brute_force", "brute force", ".3f"),
        Column("ratio", "times as fast", ".1f", "higher"),
    ),
    measure,
    note="Chamfer: forward and backward, from points on the target's surface (a unit square) or\n"
    "0.05 off it. Brute force: torch.cdist in chunks, with autograd; for thinning one pick at a\n"
    "time.",
)
