"""Loads the model to upsample with, and selects the included model for a file."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import torch

from pointup.io.files import LAS_EXTENSIONS
from pointup.model.config import ModelConfig
from pointup.model.upsampler import Upsampler

SCANNER_EXTENSIONS = (*LAS_EXTENSIONS, ".e57", ".pts", ".pcd", ".bin")
"""Of files that laser scanners on the ground, on cars and in the air are read out to."""


def shipped_for(source: Path | None, denoise: bool = False) -> str:
    """Name of the included model for a file: "lidar" for formats of scanners, otherwise "shapes";
    to `denoise` "noisy"."""
    if denoise:
        return "noisy"
    return "lidar" if is_survey(source) else "shapes"


def is_survey(source: Path | None) -> bool:
    """Whether the third coordinate of a file is a height: True for the formats of scanners."""
    return source is not None and source.suffix.lower() in SCANNER_EXTENSIONS


def has_heights(source: Path | None, config: ModelConfig) -> bool:
    """Whether the third coordinate of a cloud is a height: by its file, or by its model.

    The configuration of the model decides, not its name: a directory, a copy in memory and a
    fine-tuned model are treated like the included model.
    """
    return is_survey(source) or config.has_heights


def load_model(model: Upsampler | str | Path, device: torch.device) -> Upsampler:
    """The model on `device`, in evaluation mode: a copy, or loaded by `Upsampler.from_pretrained`.

    Raises ModelError if the model can't be loaded.
    """
    if isinstance(model, Upsampler):
        return deepcopy(model).eval().to(device)
    return Upsampler.from_pretrained(model).eval().to(device)
