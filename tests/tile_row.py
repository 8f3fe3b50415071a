"""A survey of three files side by side, shared by the tests of `pointup upsample`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
from las_files import write_las

from pointup.cli.main import main
from pointup.io.files import read_points
from pointup.model.upsampler import Upsampler

CORNER = np.array([500_000.0, 4_000_000.0, 10.0])
WIDTH = 40.0


def surface(number: int, seed: int, width: float = 3 * WIDTH) -> np.ndarray:
    xy = np.random.default_rng(seed).random((number, 2)) * [width, WIDTH]
    z = 2 * np.sin(xy[:, 0] / 7) + xy[:, 1] / 20
    return (CORNER + np.column_stack([xy, z])).round(3)


def write_tiles(folder: Path) -> Path:
    """Write three files side by side in a row, one survey, and return their folder."""
    points = surface(1200, 0)
    folder.mkdir()
    column = ((points[:, 0] - CORNER[0]) // WIDTH).astype(int)
    for i in range(3):
        write_las(folder / f"{i}.las", points[column == i])
    return folder


def write_model(folder: Path) -> Path:
    """Write a small untrained model."""
    from runs import SMALL

    Upsampler(**asdict(SMALL)).save_pretrained(folder)
    return folder


def upsample(model: Path, *words: object) -> int:
    arguments = ("upsample", *words, "--model", model, "--ratio", 2)
    return main([str(word) for word in arguments])


def rows(path: Path) -> set[tuple[float, ...]]:
    return set(map(tuple, read_points(path, attributes=False).positions.tolist()))
