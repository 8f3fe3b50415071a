"""Records runs with a `Monitor`, without training: for the tests of what a run shows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState

from pointup.evaluation.cloud_metrics import Metric
from pointup.training.config import TrainConfig
from pointup.training.evaluation import EvaluationResult
from pointup.training.progress import Progress
from pointup.training.run_directory.rank_log import RankLog
from pointup.training.step_totals import StepTotals
from pointup.training.tracking.monitor import Monitor

ROWS = {
    "model": {"chamfer": 0.0123, "cd": 0.231, "p2f": 1.18},
    "midpoints": {"chamfer": 0.0131, "cd": 0.268, "p2f": 1.78},
    "source": {"chamfer": 0.0204, "cd": 0.5},
    "resampled": {"chamfer": 0.0101, "cd": 0.2185, "p2f": 0.0},
}
RESULT = EvaluationResult(ROWS, shares=[0.9, 1.1], is_complete=True)
METRICS = {
    "chamfer": Metric("Chamfer", "data unit", "mean distance there and back, not squared"),
    "cd": Metric(
        "CD", "x1e-3", "mean squared distance there and back, " + 10 * "each normalised, "
    ),
    "p2f": Metric("P2F", "x1e-3", ""),
}
SCHEDULE: Any = SimpleNamespace(
    sampler=SimpleNamespace(epoch=0, token_budget=4096, slots=2),
    total_steps=240,
    share_done=lambda progress: progress.step / 240,
)


def totals(loss: float = 0.5, num_tokens: int = 4096) -> StepTotals:
    return StepTotals(
        num_clouds=16,
        num_tokens=num_tokens,
        loss=loss,
        stop=False,
        elapsed_seconds=10.0,
        busy_seconds=(0.49, 0.48),
        data_wait_seconds=(0.0, 0.001),
        out_of_memory=0,
        data_seconds={"reading": 0.2, "packing": 0.1},
    )


@contextmanager
def new_accelerator(directory: Path, *trackers: Any) -> Iterator[Accelerator]:
    yield Accelerator(cpu=True, log_with=list(trackers), project_dir=str(directory / "elsewhere"))
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


class Recording:
    """A run that a monitor records: steps and evaluations follow each other at will."""

    def __init__(self, monitor: Monitor) -> None:
        self.monitor = monitor

    def train(self, step: int, loss: float = 0.5) -> None:
        self.monitor.progress.step = step
        taken: Any = SimpleNamespace(seconds=0.5)
        self.monitor.step(SCHEDULE, taken, totals(loss), learning_rate=1e-3, grad_norm=1.0)

    def evaluate(self, step: int, result: EvaluationResult = RESULT) -> None:
        self.monitor.progress.step = step
        self.monitor.validation(result, is_kept=True)


@contextmanager
def recording(
    accelerator: Any, output_dir: Path, step: int = 0, **options: Any
) -> Iterator[Recording]:
    """Record the rest of a run from `step` on."""
    config = TrainConfig(output_dir=output_dir, log_every=1, **options)
    opened: Any = SimpleNamespace(labels=())
    rank = accelerator.process_index, accelerator.num_processes
    monitor = Monitor(accelerator, config, opened, Progress(step=step))
    with RankLog(output_dir, *rank), monitor:
        yield Recording(monitor)
