"""train.py with one real fault in it, told by FAULT="WHAT WHERE NUMBER [RANK]".

On process RANK (all, without), in its first attempt, WHAT happens at call NUMBER of WHERE.
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

import numpy as np
import torch
from accelerate import Accelerator

import train
from pointup.data.pairs import PairDataset
from pointup.training import agreement, checkpoint
from pointup.training.evaluation import Evaluation
from pointup.training.reduction import StepReduction

PLACES: dict[str, tuple[Any, str]] = {
    "start": (train, "open_training_data"),
    "data": (PairDataset, "__getitem__"),  # In a data worker, where there are any.
    "forward": (train, "micro_batch_losses"),
    "backward": (Accelerator, "backward"),
    "reduction": (StepReduction, "finish"),
    "evaluation": (Evaluation, "records_of"),
    "saving": (checkpoint, "flush_to_disk"),
    "agreement": (agreement, "facts_of_epoch"),
}


def out_of_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")


def bad_sample(*_: Any) -> None:
    raise ValueError("sample is broken")


def send(number: signal.Signals) -> Callable[..., None]:
    return lambda *_: os.kill(os.getpid(), number)


def stop(*_: Any) -> None:
    time.sleep(1.5)  # The watchdog has told by now where this process is.
    os.kill(os.getpid(), signal.SIGSTOP)


BEFORE: dict[str, Callable[..., None]] = {
    "kill": send(signal.SIGKILL),
    "stop": stop,
    "terminate": send(signal.SIGTERM),
    "usr1": send(signal.SIGUSR1),
    "hang": lambda *_: time.sleep(600),
    "oom": out_of_memory,
    "raise": bad_sample,
}
AFTER: dict[str, Callable[[Any], Any]] = {"nan": lambda losses: losses * float("nan")}


def make_fault(what: str, where: str, number: int) -> None:
    owner, name = PLACES[where]
    real = getattr(owner, name)
    calls = 0

    def faulty(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls != number:
            return real(*args, **options)
        print(f"FAULT {what} {where} at {time.time()}", flush=True)
        if what in BEFORE:
            BEFORE[what]()
            return real(*args, **options)
        return AFTER[what](real(*args, **options))

    setattr(owner, name, faulty)


def differ(what: str) -> None:
    """Make this process differ from the others."""
    if what == "options":
        sys.argv += ["--learning-rate", "0.5"]
    elif what == "points":
        real = PairDataset.__getitem__

        def moved(self: PairDataset, key: Any) -> Any:
            sample = real(self, key)
            sample.target = sample.target + np.float32(0.01)
            return sample

        PairDataset.__getitem__ = moved


def main() -> int:
    what, where, number, *rank = os.environ["FAULT"].split()
    mine = not rank or rank[0] == os.environ.get("RANK", "0")
    if mine and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        if what == "differ":
            differ(where)
        else:
            make_fault(what, where, int(number))
    return train.main()


if __name__ == "__main__":
    sys.exit(main())
