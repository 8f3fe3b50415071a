"""AdamW in as few launches as the device allows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

FUSED = frozenset({"cuda", "xpu", "mps"})
"""Kinds of devices on which all weights are updated in one launch; elsewhere torch decides."""


def make_optimizer(
    parameters: Iterable[nn.Parameter], device: torch.device, weight_decay: float = 0.01
) -> torch.optim.AdamW:
    """AdamW for weights that are, or will be, on the device."""
    fused = True if device.type in FUSED else None
    return torch.optim.AdamW(parameters, weight_decay=weight_decay, fused=fused)


def set_learning_rate(optimizer: Any, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
