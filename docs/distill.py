r"""Trains a smaller network to place the children of a trained one: the same points in less time.

    python docs/distill.py forest small/ --data ratios/ lidar/ --hours 1 --feature-dim 32 \
        --heads 1 --position-hidden 16 --num-layers 2 --column-layers 1

Only the sources and targets of the datasets are used, as inputs. Both networks get the same clouds,
turned about the vertical and stretched along it. The loss compares the positions of their children
in spacings, predicted errors, quotas, spacing exponents, normals, and features through a linear
layer. The result has the averaged weights, and the other options and the calibration of the trained
network, which must be an `Upsampler`.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from pointup import Upsampler
from pointup.datasets.opening import open_samples
from pointup.datasets.pair_dataset import PairDataset
from pointup.geometry.local_geometry import (
    LocalGeometry,
    columns_of,
    drops,
    local_geometry,
    nearest_in_plane,
    without_bridges,
)
from pointup.geometry.midpoints import slot_ranks, slots_for_ratio
from pointup.geometry.neighbors import knn
from pointup.geometry.packed import assume_valid

WARMUP, DECAY = 50, 0.995
LARGEST_CLOUD, CHILDREN_PER_STEP = 2000, 24_000
SHARE_OF_SOURCES = 0.75
"""Share of the clouds that are sources of pairs; the others are targets."""


class Described(NamedTuple):
    """What a network says of the points of a batch, and of their children."""

    children: Tensor
    features: Tensor
    normals: Tensor
    power: Tensor
    quota: Tensor


def main() -> None:
    arguments = parsed()
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    rng = np.random.default_rng(arguments.seed)
    teacher = Upsampler.from_pretrained(arguments.teacher).eval().requires_grad_(False)
    config = teacher.config
    names = "feature_dim", "position_hidden", "heads", "num_layers", "column_layers"
    sizes = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    student = Upsampler(**{**asdict(config), **sizes, "child_heads": arguments.heads})
    if arguments.initial:
        student.load_state_dict(Upsampler.from_pretrained(arguments.initial).state_dict())
    average = copy.deepcopy(student).requires_grad_(False)
    average.calibration = teacher.calibration
    widen = nn.Linear(arguments.feature_dim, config.feature_dim)
    weights = [*student.parameters(), *widen.parameters()]
    optimizer = torch.optim.AdamW(weights, weight_decay=1e-4)
    datasets = [PairDataset(open_samples(folder, "train")) for folder in arguments.data]
    start, step, means = time.monotonic(), 0, None
    while (done := (time.monotonic() - start) / (3600 * arguments.hours)) < 1:
        cosine = (1 + math.cos(math.pi * done)) / 2
        rate = arguments.learning_rate * min(1, (step + 1) / WARMUP) * cosine
        optimizer.param_groups[0]["lr"] = rate
        slots = int(slots_for_ratio(float(rng.choice(arguments.ratios)), config.slots_per_ratio))
        pos, ptr = clouds(datasets, CHILDREN_PER_STEP // (slots + 4), rng)
        with assume_valid():
            terms = differences(teacher, student, widen, pos, ptr, slots)
        optimizer.zero_grad()
        (terms * torch.tensor([5.0, 1.0, 1.0, 0.2, 0.1, 0.2])).sum().backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        step += 1
        with torch.no_grad():
            for mean, weight in zip(average.parameters(), student.parameters(), strict=True):
                mean.lerp_(weight, 1 - min(DECAY, step / (step + 10)))
        means = terms.detach() if means is None else means.lerp(terms.detach(), 0.02)
        if step % 100 == 0:
            names = "children", "errors", "quotas", "power", "normals", "features"
            text = ", ".join(
                f"{name} {value:.4f}" for name, value in zip(names, means.tolist(), strict=True)
            )
            print(f"step {step}, {100 * done:.0f} %: {text}", flush=True)
            average.save_pretrained(arguments.output)
    average.save_pretrained(arguments.output)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a smaller network on a trained one.")
    parser.add_argument("teacher")
    parser.add_argument("output", type=Path)
    parser.add_argument("--data", nargs="+", type=Path, required=True)
    parser.add_argument("--ratios", nargs="+", type=float, default=[2, 4, 8, 16, 26])
    parser.add_argument("--hours", type=float, required=True)
    parser.add_argument("--initial", help="start from this result, of the same sizes")
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--feature-dim", type=int, required=True)
    parser.add_argument("--heads", type=int, required=True)
    parser.add_argument("--position-hidden", type=int, required=True)
    parser.add_argument("--num-layers", type=int, help="by default those of the trained network")
    parser.add_argument("--column-layers", type=int)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def clouds(
    datasets: list[PairDataset], num_points: int, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Packed clouds (N, 3) float32 and their ptr (B + 1,), N at least `num_points`.

    Each dataset gives the same share of the clouds.
    """
    found, total = [], 0
    while total < num_points:
        dataset = datasets[rng.integers(len(datasets))]
        pair = dataset[int(rng.integers(len(dataset)))]
        pos = pair.pos if rng.random() < SHARE_OF_SOURCES else pair.target
        pos = pos.double() - pos.double().mean(0)
        if len(pos) > LARGEST_CLOUD:
            off = (pos - pos[rng.integers(len(pos))])[:, :2].square().sum(1)
            pos = pos[off.argsort()[:LARGEST_CLOUD]]
        turn = 2 * math.pi * rng.random()
        stretch = math.exp(0.15 * rng.standard_normal())
        rows = [[math.cos(turn), -math.sin(turn), 0], [math.sin(turn), math.cos(turn), 0]]
        matrix = torch.tensor([*rows, [0, 0, stretch]], dtype=torch.float64)
        found.append((pos @ matrix.T).float())
        total += len(pos)
    return torch.cat(found), torch.tensor([0, *np.cumsum([len(pos) for pos in found])])


def differences(
    teacher: Upsampler, student: Upsampler, widen: nn.Linear, pos: Tensor, ptr: Tensor, slots: int
) -> Tensor:
    """Mean differences (6,) between what the networks say of points (N, 3): of their children, in
    spacings, errors, quotas, exponents, normals and features."""
    config = teacher.config
    ranks, num_neighbors = slot_ranks(slots, config.extrapolation), config.k + 1
    squared, neighbors = knn(pos, ptr, max(num_neighbors, int(ranks.max()) + 1))
    near = squared[:, :num_neighbors], neighbors[:, :num_neighbors]
    geometry = local_geometry(pos, ptr, *near)
    index = without_bridges(neighbors[:, ranks], slice(0, len(pos)), pos, geometry.local_spacing)
    with torch.no_grad():
        wanted = described(teacher, pos, ptr, index, geometry)
    made = described(student, pos, ptr, index, geometry)
    is_child = index >= 0
    off = (made.children - wanted.children)[is_child]
    spacing = geometry.spacing.expand(index.shape)[is_child]
    apart = torch.sqrt((off[:, :3] / spacing[:, None]).square().sum(1) + 1e-6)
    error = off[:, 3:].abs().mean() if off.shape[1] > 3 else off.new_zeros(())
    features = (widen(made.features) - wanted.features).square().mean() / wanted.features.var()
    return torch.stack([
        apart.mean(),
        error,
        (made.quota - wanted.quota).abs().mean(),
        (made.power - wanted.power).abs().mean(),
        1 - (made.normals * wanted.normals).sum(1).square().mean(),
        features,
    ])  # fmt: skip


def described(
    model: Upsampler, pos: Tensor, ptr: Tensor, index: Tensor, geometry: LocalGeometry
) -> Described:
    """What a network says of points (N, 3) and of children tied to their neighbours (N, R)."""
    config, columns, drop = model.config, None, None
    if config.column_layers:
        in_plane = nearest_in_plane(pos, ptr, config.column_size)
        columns = columns_of(pos, in_plane, config.column_stride)
        if config.descent:
            drop = drops(columns, config.reach * geometry.local_spacing)
    points = model.describe(geometry, columns, recompute=False)
    rows = slice(0, len(pos))
    children = model.place_children(pos, rows, index, points, geometry, recompute=False, drop=drop)
    power, quota = model.spacing_power(points), model.quota_logits(points, geometry)
    return Described(children, points.features, points.normals, power, quota)


if __name__ == "__main__":
    main()
