"""The model to upsample with: one of the user's, or one of those that the package ships."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import torch

from pointup.io.files import LAS_EXTENSIONS
from pointup.model.upsampler import Upsampler

SCANNER_EXTENSIONS = (*LAS_EXTENSIONS, ".e57", ".pts", ".pcd", ".bin")
"""Of files that laser scanners on the ground, on cars and in the air are read out to."""


def shipped_for(source: Path | None) -> str:
    """Name of the shipped model for a file: "lidar" for formats of scanners, otherwise "shapes"."""
    return "lidar" if is_survey(source) else "shapes"


def is_survey(source: Path | None) -> bool:
    """Whether a file is of a format of scanners, whose third coordinate is taken for a height."""
    return source is not None and source.suffix.lower() in SCANNER_EXTENSIONS


def load_model(model: Upsampler | str | Path, device: torch.device) -> Upsampler:
    """A model of its own, in evaluation mode: a copy, or what `Upsampler.from_pretrained` loads.

    Raises ModelError where there is no model.
    """
    if isinstance(model, Upsampler):
        return deepcopy(model).eval().to(device)
    return Upsampler.from_pretrained(model).eval().to(device)
