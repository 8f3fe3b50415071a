"""Plans the next epoch in a process of its own, while this process trains.

A thread would hold up the training, because planning is Python code. The process is started as a
program and not by multiprocessing, which would import the training script in it: it needs numpy
only.
"""

from __future__ import annotations

import atexit
import json
import logging
import subprocess
import sys
import tempfile
import weakref
from dataclasses import asdict, dataclass
from typing import IO, Any

import numpy as np

from pointup.datasets.mixture import Mixture
from pointup.datasets.packing import Plan, cropped_sizes, plan_epoch

logger = logging.getLogger("pointup")

SECONDS_TO_END = 5.0


@dataclass(frozen=True)
class Request:
    """What the plan of a whole epoch depends on, beside the sizes."""

    seed: int
    epoch: int
    token_budget: int
    slots: int
    max_clouds: int | None
    lengths: tuple[int, ...] = ()
    """Number of samples of each dataset, if there are several; empty for one of weight 1."""
    weights: tuple[float, ...] = ()

    def plan(self, sizes: np.ndarray) -> Plan:
        """Plan the epoch; `sizes` (n,) are those of all samples."""
        mixture = Mixture(self.lengths or (len(sizes),), self.weights or (1.0,))
        return plan_epoch(
            cropped_sizes(sizes, self.token_budget),
            mixture.samples(self.seed, self.epoch),
            self.token_budget,
            self.slots,
            self.max_clouds,
            np.random.default_rng([self.seed, self.epoch, 0]),
        )


class PlanAhead:
    """One request at a time, answered by another process."""

    def __init__(self) -> None:
        self.request: Request | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._answer: IO[bytes] | None = None

    def start(self, request: Request, sizes: np.ndarray) -> None:
        """Begin to plan; a request that is being answered is dropped, unless it is the same.

        If no process can be started, this is logged, and `result` gives no plan.
        """
        if request == self.request:
            return
        self.end()
        try:
            self._start(request, sizes)
        # No memory for a process, a full disk, or a Python inside of another program.
        except OSError as error:
            logger.warning("can't plan epoch %d ahead (%s)", request.epoch, error)
            self.end()

    def _start(self, request: Request, sizes: np.ndarray) -> None:
        self._answer = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `end`)
        with tempfile.TemporaryFile() as question:
            question.write(json.dumps(asdict(request)).encode() + b"\n")
            np.save(question, sizes)
            question.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pointup.datasets.plan_ahead"],
                stdin=question,
                stdout=self._answer,
                stderr=subprocess.DEVNULL,
                # Ctrl-C and a closed terminal reach the process group of the training.
                start_new_session=True,
            )
        self.request = request
        RUNNING.add(self)

    def result(self, request: Request) -> Plan | None:
        """The plan of a request, once it is ready; None if it was not requested, or failed."""
        if request != self.request or self._process is None or self._answer is None:
            return None
        status = self._process.wait()
        self._answer.seek(0)
        plan = None
        if status == 0:
            samples, ptr = np.load(self._answer), np.load(self._answer)
            plan = Plan(samples, ptr, request.slots)
        else:
            logger.warning("planning ahead failed with status %d; planning now", status)
        self.end()
        return plan

    def end(self) -> None:
        """End the process, if it runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait(SECONDS_TO_END)
        if self._answer is not None:
            self._answer.close()
        self.request = self._process = self._answer = None

    def __reduce__(self) -> tuple[Any, ...]:
        return PlanAhead, ()


RUNNING: weakref.WeakSet[PlanAhead] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for planner in list(RUNNING):
        planner.end()


def main() -> None:
    """Read a request and the sizes from stdin; write the plan to stdout."""
    import os

    if hasattr(os, "nice"):
        os.nice(10)
    request = Request(**json.loads(sys.stdin.buffer.readline()))
    plan = request.plan(np.load(sys.stdin.buffer))
    for array in (plan.samples, plan.ptr):
        np.save(sys.stdout.buffer, array)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
