"""Runs train.py with one real fault, given by FAULT="WHAT WHERE NUMBER [RANK]".

On process RANK (by default on all), in its first attempt, WHAT happens at call NUMBER of WHERE.
With SEEN=DIRECTORY each process writes the clouds of every step there. STEP_SECONDS makes every
step longer by that time, so that external disturbances reach the run while it trains.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from accelerate import Accelerator

import train
from pointup import disk
from pointup.datasets.pair_dataset import PairDataset
from pointup.training import datasets
from pointup.training.distributed.reduction import StepReduction
from pointup.training.evaluation import Evaluation
from pointup.training.faults import token_budget as budget
from pointup.training.faults.available_memory import PeakMemory
from pointup.training.step_totals import StepMeter, StepTotals
from pointup.training.training_state import RunState

PLACES: dict[str, tuple[Any, str]] = {
    "start": (train, "open_training_data"),
    "worker": (PairDataset, "__getitem__"),  # In a data worker only.
    "forward": (train, "losses_of_model"),
    "backward": (Accelerator, "backward"),
    "window": (StepReduction, "add"),
    "reduction": (StepReduction, "reduce"),
    "evaluation": (Evaluation, "records_of"),
    "checkpoint": (RunState, "save"),
    "saving": (disk, "flush_to_disk"),
    "consistency": (datasets, "check_consistency"),
}


def out_of_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")


def bad_sample(*_: Any) -> None:
    raise ValueError("sample is broken")


def send(number: signal.Signals) -> Callable[..., None]:
    return lambda *_: os.kill(os.getpid(), number)


def stop(*_: Any) -> None:
    time.sleep(1.5)  # By now the watchdog has posted the phase of this process.
    os.kill(os.getpid(), signal.SIGSTOP)


def lose_gradient(reduction: StepReduction, *_: Any) -> None:
    for parameter in reduction.parameters[:3]:
        parameter.grad = None


BEFORE: dict[str, Callable[..., None]] = {
    "kill": send(signal.SIGKILL),
    "stop": stop,
    "terminate": send(signal.SIGTERM),
    "usr1": send(signal.SIGUSR1),
    "hang": lambda *_: time.sleep(600),
    "oom": out_of_memory,
    "raise": bad_sample,
    "lose": lose_gradient,
}
AFTER: dict[str, Callable[[Any], Any]] = {"nan": lambda losses: losses * float("nan")}


def make_fault(what: str, where: str, number: int) -> None:
    owner, name = PLACES[where]
    real = getattr(owner, name)
    calls = 0

    def faulty(*args: Any, **options: Any) -> Any:
        nonlocal calls
        if where == "worker" and torch.utils.data.get_worker_info() is None:
            return real(*args, **options)
        calls += 1
        if calls != number:
            return real(*args, **options)
        print(f"FAULT {what} {where} at {time.time()}", flush=True)
        if what in BEFORE:
            BEFORE[what](*args)
            return real(*args, **options)
        return AFTER[what](real(*args, **options))

    setattr(owner, name, faulty)


def differ(what: str) -> None:
    """Make this process differ from the others: in an option, in points, or in its whole data."""
    if what == "options":
        sys.argv += ["--learning-rate", "0.5"]
    else:
        sys.argv[sys.argv.index("--data") + 1] = what


def have_memory_for(num_clouds: int) -> None:
    """Run out of memory in every micro-batch of more than `num_clouds` clouds."""
    real = train.losses_of_model

    def limited(model: Any, batch: Any, *rest: Any) -> Any:
        if batch.num_graphs > num_clouds:
            out_of_memory()
        return real(model, batch, *rest)

    train.losses_of_model = limited


def have_memory_left(num_bytes: int) -> None:
    """Limit the search of the token budget to the current memory plus `num_bytes`."""

    def limit(*_: Any) -> int:
        with PeakMemory(torch.device("cpu")) as now:
            pass
        return int((now.bytes + num_bytes) / budget.SHARE_TO_USE)

    budget.memory_limit = limit


def record_clouds(directory: Path) -> None:
    real = StepMeter.totals

    def totals(self: StepMeter, reduced: list[float]) -> StepTotals:
        with (directory / f"{os.getpid()}.txt").open("a") as file:
            file.writelines(f"{name}\n" for piece in self.pieces for name in piece.names)
        return real(self, reduced)

    StepMeter.totals = totals


def slow_down_steps(seconds: float) -> None:
    real = train.StepMeter

    def after_a_pause(*given: Any) -> StepMeter:
        time.sleep(seconds)
        return real(*given)

    train.StepMeter = after_a_pause


def main() -> int:
    what, where, number, *rank = os.environ["FAULT"].split()
    is_here = not rank or rank[0] == os.environ.get("RANK", "0")
    if "SEEN" in os.environ:
        record_clouds(Path(os.environ["SEEN"]))
    if "STEP_SECONDS" in os.environ:
        slow_down_steps(float(os.environ["STEP_SECONDS"]))
    if is_here and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        if what == "differ":
            differ(where)
        elif what == "small":
            have_memory_for(int(number))
        elif what == "memory":
            have_memory_left(int(number))
        else:
            make_fault(what, where, int(number))
    return train.main()


if __name__ == "__main__":
    sys.exit(main())
