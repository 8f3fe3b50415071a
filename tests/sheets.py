"""Clouds, a small model and stores, shared by the tests of upsampling."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from pointup.io.cloud import PointCloud
from pointup.model.upsampler import Upsampler
from pointup.upsampling.executor import SingleProcess
from pointup.upsampling.options import UpsampleOptions
from pointup.upsampling.passes import run_passes
from pointup.upsampling.store.point_store import Store

CPU = torch.device("cpu")
UTM = np.array([500_000.0, 4_100_000.0, 0.0])
SMALL = {"feature_dim": 8, "k": 6, "num_layers": 1, "heads": 2, "child_heads": 2}
StoreMaker = Callable[..., Store]


def small_model(noise: float = 0.0, **options: object) -> Upsampler:
    """A small model for tests; with noise it moves the children, like a trained model."""
    torch.manual_seed(0)
    model = Upsampler(**{**SMALL, **options}).eval()
    with torch.no_grad():
        for weights in model.parameters():
            weights += noise * torch.randn_like(weights)
    return model


def sheet(num_points: int, side: float = 32.0, seed: int = 0) -> np.ndarray:
    """Random points of a wavy sheet."""
    rng = np.random.default_rng(seed)
    xy = side * rng.random((num_points, 2))
    return np.column_stack([xy, np.sin(xy[:, 0] / 3) + np.cos(xy[:, 1] / 4)])


def grid(side: int) -> np.ndarray:
    axis = np.arange(side, dtype=np.float64)
    return np.stack(np.meshgrid(axis, axis, [0.0]), axis=-1).reshape(-1, 3)


def in_chunks(cloud: PointCloud, size: int) -> Iterator[PointCloud]:
    for start in range(0, len(cloud), size):
        yield cloud.select(slice(start, start + size))


def upsample_in_blocks(
    store: Store,
    model: Upsampler,
    options: UpsampleOptions,
    tile: float | None = None,
    budget: int = 400,
    device: torch.device = CPU,
) -> np.ndarray:
    workers = SingleProcess()
    output = run_passes(store, model, options, workers, device, token_budget=budget, tile=tile)
    return np.concatenate([np.empty((0, 3)), *(cloud.positions for cloud in output.of_file())])
