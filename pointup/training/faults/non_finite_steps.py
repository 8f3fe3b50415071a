"""Skips steps with a non-finite loss or gradient on all processes, and ends a run after several."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from accelerate import Accelerator
from accelerate.utils import gather_object

from pointup.errors import TrainingError
from pointup.training.step_totals import Piece

logger = logging.getLogger("pointup")

MAX_NON_FINITE_STEPS = 10
"""Non-finite steps in a row after which a run ends."""
MAX_NAMED = 8
"""Clouds that a message names at most."""


class NonFiniteSteps:
    """Decides whether a step is taken, by its loss and gradient, the same on every process."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.in_a_row = 0
        self.suspects: set[str] = set()
        """Clouds that all non-finite steps in a row have in common."""

    def may_step(
        self,
        step: int,
        loss: float,
        grad_norm: float,
        learning_rate: float,
        pieces: Sequence[Piece],
    ) -> bool:
        """Whether the optimizer may take this step; every process must call this.

        `pieces` are the micro-batches of this process; the log lists the clouds of all processes
        that may have caused a non-finite number. Raises TrainingError, with step and learning rate,
        after `MAX_NON_FINITE_STEPS` in a row.
        """
        scaler = self.accelerator.scaler
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self.in_a_row = 0
            return True
        if scaler is not None and math.isfinite(loss) and scaler.get_scale() >= 1.0:
            # fp16 gradients overflow now and then; the scaler then skips the step and halves its
            # scale. At a scale below 1, overflow by scaling is not the cause.
            return True
        self.in_a_row += 1
        clouds = sorted(set(gather_object(non_finite_clouds(pieces))))
        self.suspects = set(clouds) & (self.suspects if self.in_a_row > 1 else set(clouds))
        if self.accelerator.is_main_process:
            logger.warning(
                "step %d skipped: loss %.4g, gradient %.4g, at learning rate %.3g, from %s",
                step, loss, grad_norm, learning_rate, named(clouds),
            )  # fmt: skip
        if self.in_a_row == MAX_NON_FINITE_STEPS:
            remedy = (
                f"all of them from {named(sorted(self.suspects))}: check these clouds"
                if self.suspects
                else "from other clouds each time: training has diverged; lower --learning-rate, "
                "in another --output-dir"
            )
            raise TrainingError(
                f"{MAX_NON_FINITE_STEPS} steps in a row, the last one step {step} at learning rate "
                f"{learning_rate:.3g} from {named(clouds)}, had a non-finite loss or gradient, "
                f"{remedy}; the last checkpoint is unchanged"
            )
        if scaler is not None:
            # In place of the optimizer's step, which would take finite gradients of a loss that is
            # not finite. Without an update the scaler refuses the next step.
            scaler.update()
        return False


def non_finite_clouds(pieces: Sequence[Piece]) -> list[str]:
    """Clouds of this process with a non-finite loss, or else all clouds of the first of its
    `pieces` with a non-finite gradient."""
    bad = [
        name
        for piece in pieces
        for name, is_finite in zip(piece.names, piece.losses.isfinite().tolist(), strict=True)
        if not is_finite
    ]
    first = (piece.names for piece in pieces if not piece.sum_so_far.isfinite())
    return bad or next(first, [])


def named(clouds: list[str]) -> str:
    """The names of clouds for a message, at most MAX_NAMED."""
    more = f" and {len(clouds) - MAX_NAMED} more" if len(clouds) > MAX_NAMED else ""
    return ", ".join(clouds[:MAX_NAMED]) + more or "no cloud in particular"
