"""Learning rate as a pure function of step and progress, and its scaling with the batch size."""

from __future__ import annotations

import math
from typing import Literal

LrScaling = Literal["none", "sqrt", "linear"]


def learning_rate_at(
    step: int, progress: float, peak: float, warmup_steps: int, final_fraction: float = 0.02
) -> float:
    """Learning rate of optimizer step `step` (the first is 0).

    Linear warm-up over `warmup_steps`, times half a cosine in `progress`, the completed share of
    the run from 0 to 1. The function has no state, so checkpoints store none.
    """
    warmup = min(1.0, (step + 1) / max(warmup_steps, 1))
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(max(progress, 0.0), 1.0)))
    return peak * warmup * (final_fraction + (1.0 - final_fraction) * cosine)


def scaled_learning_rate(
    learning_rate: float, scaling: LrScaling, clouds_per_step: float, reference_clouds: float
) -> float:
    """Learning rate for `clouds_per_step`, given the learning rate for `reference_clouds`.

    `linear` follows Goyal et al. 2017; `sqrt` suits Adam (Malladi et al. 2022).
    """
    factor = clouds_per_step / reference_clouds
    exponent = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}[scaling]
    return learning_rate * factor**exponent
