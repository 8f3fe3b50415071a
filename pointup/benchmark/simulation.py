"""Predicts training on many processes from measured step times and the plan of the batches.

Assumptions:

- A process computes a micro-batch in a + b * tokens, times a factor drawn from those measured, and
  no process slows another down, except where processes share the cores of the measured machine.
- All processes wait for the slowest one in each step. Data workers keep up.
- The reduction sends 2 * (P - 1) / P times the buffer through the slowest connection, as optimal
  algorithms do, in 2 * ceil(log2(P)) rounds of one latency each.
- After the reduction each process updates its weights in the same time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class StepTimes:
    """Seconds that a micro-batch takes: (fixed + per_token * tokens) * factor.

    Attributes:
        factors: (n,) measured times divided by the fitted ones.
        update: seconds of a step after the reduction.
    """

    fixed: float
    per_token: float
    factors: np.ndarray
    update: float

    @classmethod
    def fitted(cls, tokens: np.ndarray, seconds: np.ndarray, update: float) -> StepTimes:
        """From measured micro-batches (n,); by least squares of relative errors, not negative."""
        columns = np.column_stack([np.ones(len(tokens)), tokens]) / seconds[:, None]
        fixed, per_token = np.linalg.lstsq(columns, np.ones(len(tokens)), rcond=None)[0]
        if fixed < 0 or per_token < 0:
            fixed, per_token = 0.0, float(seconds.sum() / tokens.sum())
        return cls(
            float(fixed), float(per_token), seconds / (fixed + per_token * tokens), float(update)
        )

    def draw(self, tokens: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Seconds of micro-batches with these tokens; 0 for empty ones."""
        seconds = (self.fixed + self.per_token * tokens) * rng.choice(self.factors, tokens.shape)
        return np.where(tokens > 0, seconds, 0.0)


@dataclass(frozen=True)
class ReductionTimes:
    """Seconds of a reduction: latency per round, and seconds to send the buffer once."""

    latency: float
    transfer: float

    @classmethod
    def fitted(cls, small: float, large: float, num_processes: int) -> ReductionTimes:
        """From the measured seconds of a tiny buffer and of the real one."""
        rounds = 2 * math.ceil(math.log2(num_processes))
        sent = 2 * (num_processes - 1) / num_processes
        return cls(small / rounds, max(0.0, large - small) / sent)

    def seconds(self, num_processes: int) -> float:
        if num_processes == 1:
            return 0.0
        rounds = 2 * math.ceil(math.log2(num_processes))
        sent = 2 * (num_processes - 1) / num_processes
        return rounds * self.latency + sent * self.transfer


@dataclass(frozen=True)
class Prediction:
    """What a simulated epoch takes.

    Attributes:
        steps_per_second: optimizer steps.
        tokens_per_second: of all processes.
        idle: share of the computing time spent waiting for the slowest process.
        reduction: seconds of a reduction.
    """

    steps_per_second: float
    tokens_per_second: float
    idle: float
    reduction: float


def simulate(
    loads: np.ndarray,
    steps: StepTimes,
    reduction: ReductionTimes,
    seed: int = 0,
    cores: int | None = None,
) -> Prediction:
    """Predict the steps of a plan; `loads` (num_steps, P) are the tokens of each process.

    With `cores`, P processes share that many cores; without, each has its own.
    """
    num_processes = loads.shape[1]
    busy = steps.draw(loads, np.random.default_rng(seed))
    slowest = busy.max(axis=1)
    crowd = max(1.0, num_processes / cores) if cores else 1.0
    computing = np.maximum(slowest, busy.sum(axis=1) * crowd / num_processes)
    reduced = reduction.seconds(num_processes)
    total = float((computing + reduced + steps.update * crowd).sum())
    return Prediction(
        steps_per_second=len(loads) / total,
        tokens_per_second=float(loads.sum()) / total,
        idle=float(1 - busy.sum() / (slowest.sum() * num_processes)),
        reduction=reduced,
    )
