"""The model to upsample with."""

from __future__ import annotations

from contextlib import redirect_stdout
from copy import deepcopy
from io import StringIO
from pathlib import Path

import torch

from pointup.errors import ModelError
from pointup.model import Upsampler

WEIGHTS = Path(__file__).parents[1] / "weights"
"""Where the package keeps the models it ships, a directory each; the first one is the default."""


def load_model(model: Upsampler | str | Path | None, device: torch.device) -> Upsampler:
    """A model of its own, in evaluation mode: a copy, from a directory or the Hub, or the default.

    Raises ModelError where there is none.
    """
    if isinstance(model, Upsampler):
        return deepcopy(model).eval().to(device)
    if model is None:
        shipped = sorted(WEIGHTS.glob("*/config.json"))
        if not shipped:
            raise ModelError(
                "no model is shipped with this version: train one with `accelerate launch "
                "--config_file accelerate_configs/cpu.yaml train.py`, then give --model "
                "runs/default/model"
            )
        model = shipped[0].parent
    # The Hub's loader prints where it loads from.
    with redirect_stdout(StringIO()):
        return Upsampler.from_pretrained(model).eval().to(device)
