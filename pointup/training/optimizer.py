"""Makes the AdamW optimizer, fused where the device supports it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

FUSED = frozenset({"cuda", "xpu", "mps"})
"""Device types with a fused AdamW, one launch for all weights; on others torch decides."""


def make_optimizer(
    parameters: Iterable[nn.Parameter], device: torch.device, weight_decay: float = 0.01
) -> torch.optim.AdamW:
    """AdamW for parameters that are, or will be, on `device`."""
    fused = True if device.type in FUSED else None
    return torch.optim.AdamW(parameters, weight_decay=weight_decay, fused=fused)


def set_learning_rate(optimizer: Any, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
