"""Predicts training on many processes from measured step times and the plan of the batches.

Assumptions:

- A process computes a micro-batch in a + b * tokens, times two factors drawn from those measured.
  One is common to all processes of a machine in a step: what slows the machine down slows all of
  them down, so that none waits. The other is that of the process alone.
- No process slows another down, except where processes share the cores of the measured machine.
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
    """Seconds that a micro-batch takes: (fixed + per_token * tokens) * common * own.

    Attributes:
        common: (n,) factors of a step for all processes of a machine.
        own: (m,) factors of a step for one process.
        update: seconds of a step after the reduction.
    """

    fixed: float
    per_token: float
    common: np.ndarray
    own: np.ndarray
    update: float

    @classmethod
    def fitted(
        cls,
        tokens: np.ndarray,
        seconds: np.ndarray,
        update: float,
        group_tokens: np.ndarray,
        group_seconds: np.ndarray,
    ) -> StepTimes:
        """From measured micro-batches (n,) of one process, and (S, P) of a group on one machine.

        The line is that of one process, by least squares of relative errors, not negative. The
        spread of its times is that of the process and of the machine together. How far the
        processes of the group differ within a step tells how much of it is that of a process.
        """
        columns = np.column_stack([np.ones(len(tokens)), tokens]) / seconds[:, None]
        fixed, per_token = np.linalg.lstsq(columns, np.ones(len(tokens)), rcond=None)[0]
        if fixed < 0 or per_token < 0:
            fixed, per_token = 0.0, float(seconds.sum() / tokens.sum())
        factors = seconds / (fixed + per_token * tokens)
        of_group = np.log(group_seconds / (fixed + per_token * group_tokens))
        own, common = _deviations(of_group), np.log(factors)
        share = max(0.0, 1 - np.var(own) / np.var(common)) if np.var(common) > 0 else 0.0
        own, common = np.exp(own), np.exp(np.sqrt(share) * (common - common.mean()))
        # The mean time of one process stays that measured.
        common *= factors.mean() / (common.mean() * own.mean())
        return cls(float(fixed), float(per_token), common, own, float(update))

    def draw(self, tokens: np.ndarray, per_machine: int, rng: np.random.Generator) -> np.ndarray:
        """Seconds of micro-batches with these tokens (S, P), 0 for empty ones; of the processes,
        each `per_machine` consecutive ones share a machine."""
        num_steps, num_processes = tokens.shape
        machine = np.arange(num_processes) // per_machine
        common = rng.choice(self.common, (num_steps, machine[-1] + 1))[:, machine]
        factors = common * rng.choice(self.own, tokens.shape)
        return np.where(tokens > 0, (self.fixed + self.per_token * tokens) * factors, 0.0)


def _deviations(logs: np.ndarray) -> np.ndarray:
    """How far values (S, P) lie from the mean of their row, (S * P,), with the variance of a value.

    Deviations from the mean of P values vary less than the values, by the factor (P - 1) / P.
    """
    num_processes = logs.shape[1]
    deviations = logs - logs.mean(axis=1, keepdims=True)
    flat: np.ndarray = (deviations * np.sqrt(num_processes / (num_processes - 1))).reshape(-1)
    return flat


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
    per_machine: int | None = None,
) -> Prediction:
    """Predict the steps of a plan; `loads` (num_steps, P) are the tokens of each process.

    With `cores`, P processes share that many cores; without, each has its own. `per_machine` is the
    number of processes on a machine; by default all are on one.
    """
    num_processes = loads.shape[1]
    busy = steps.draw(loads, per_machine or num_processes, np.random.default_rng(seed))
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
