"""Options and weights of small runs of train.py in this process, shared by its tests."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from conftest import ROOT
from safetensors.torch import load_file
from torch import Tensor

sys.path.insert(0, str(ROOT))

import train as training
from pointup.model.config import ModelConfig
from pointup.training.config import TrainConfig

__all__ = ["SMALL", "TrainConfig", "final_weights", "options", "training"]

SMALL = ModelConfig(feature_dim=16, k=6, num_layers=1, heads=2, child_heads=2, position_hidden=8)


def options(data: Path, output_dir: Path, **changes: Any) -> TrainConfig:
    return TrainConfig(
        **{
            "data": (str(data),), "output_dir": output_dir, "steps": 6, "token_budget": 1200,
            "num_workers": 0, "log_every": 1, "eval_every": 6, "save_every": 3,
            "num_pictures": 0, "model": SMALL, **changes,
        }
    )  # fmt: skip


def final_weights(output_dir: Path, step: int = 6) -> dict[str, Tensor]:
    return load_file(output_dir / "checkpoints" / f"step_{step}" / "model.safetensors")
