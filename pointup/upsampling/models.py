"""The model to upsample with: one of the user's, or one of those that the package ships."""

from __future__ import annotations

from contextlib import redirect_stdout
from copy import deepcopy
from io import StringIO
from pathlib import Path

import torch

from pointup.data.files import LAS_EXTENSIONS
from pointup.model import Upsampler

WEIGHTS = Path(__file__).parents[1] / "weights"
SHIPPED = ("shapes", "lidar")
"""Models in the package, by name: of surfaces sampled without gaps, and of surveys from the air."""


def shipped_for(source: Path | None) -> str:
    """Name of the shipped model for a file: "lidar" for LAS and LAZ, otherwise "shapes"."""
    return "lidar" if source and source.suffix.lower() in LAS_EXTENSIONS else "shapes"


def load_model(model: Upsampler | str | Path, device: torch.device) -> Upsampler:
    """A model of its own, in evaluation mode: a copy, or from a shipped name, a directory or the
    Hub.

    A directory with the name of a shipped model is given as ./NAME. Raises ModelError where there
    is no model.
    """
    if isinstance(model, Upsampler):
        return deepcopy(model).eval().to(device)
    if str(model) in SHIPPED:
        model = WEIGHTS / str(model)
    # The Hub's loader prints where it loads from.
    with redirect_stdout(StringIO()):
        return Upsampler.from_pretrained(model).eval().to(device)
