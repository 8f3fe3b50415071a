"""Clouds for the benchmark: any number of points on a hilly surface."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch_geometric.data import Batch, Data

from pointup.datasets.batch import collate
from pointup.datasets.pair_dataset import in_spatial_order
from pointup.geometry.packed import ptr_from_sizes

RATIO = 4.0


def sheet(num_points: int, seed: int, noise: float = 0.0) -> Tensor:
    """Random points (N, 3) float32 on a hilly surface over the unit square."""
    random = torch.Generator().manual_seed(seed)
    x, y = torch.rand(2, num_points, generator=random)
    z = 0.15 * (7 * x).sin() * (5 * y).cos() + 0.03 * (31 * x + 17 * y).sin()
    return torch.stack([x, y, z], dim=1) + noise * torch.randn(num_points, 3, generator=random)


def ragged(
    num_points: int, num_clouds: int, seed: int, noise: float = 0.0
) -> tuple[Tensor, Tensor]:
    """`num_points` points (N, 3) in clouds of sizes 1 : 2 : 3 : ..., and their ptr."""
    cumulative = torch.arange(num_clouds + 1).cumsum(0).double()
    ptr = (cumulative / cumulative[-1] * num_points).round().long()
    clouds = [
        sheet(int(size), seed + cloud, noise) for cloud, size in enumerate(ptr[1:] - ptr[:-1])
    ]
    return torch.cat(clouds), ptr


def training_batch(sizes: Sequence[int], seed: int = 0) -> Batch:
    """A batch of pairs with sources of the given sizes and targets of `RATIO` times as many points.

    Points are in the order of `PairDataset`.
    """
    pairs = []
    for number, size in enumerate(sizes):
        clouds = {
            "source": sheet(size, seed + 2 * number).numpy(),
            "target": sheet(round(RATIO * size), seed + 2 * number + 1).numpy(),
        }
        source, target = map(torch.from_numpy, in_spatial_order(clouds).values())
        pairs.append(Data(pos=source, target=target, name=f"sheet {number}", index=number))
    return collate(pairs)


def one_cloud(pos: Tensor) -> Tensor:
    """ptr (2,) of a single cloud."""
    return ptr_from_sizes(torch.tensor([len(pos)], device=pos.device))
