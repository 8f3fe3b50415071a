"""Opens the directory of a run, and the quick check of a setup."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from accelerate import Accelerator

from pointup.training.config import TrainConfig, claim_output_dir, quick_config
from pointup.training.faults.consistency import check_consistency, facts_of_start
from pointup.training.run_directory.lock import RunLock
from pointup.training.run_directory.rank_log import RankLog


@contextmanager
def open_run(config: TrainConfig, accelerator: Accelerator) -> Iterator[None]:
    """In the `with` block the run directory is that of this run: locked, with the log of this
    process, and with config.json. Every process must enter.

    With `debug` the backward pass looks for anomalies. Raises TrainingError unless all processes
    have the same options and code, and ConfigError if another run trains in the directory, or a run
    with other options did.
    """
    rank = accelerator.process_index, accelerator.num_processes
    with RunLock(config.output_dir, accelerator):
        check_consistency(accelerator, facts_of_start(config, accelerator.mixed_precision))
        with (
            RankLog(config.output_dir, *rank, is_verbose=config.debug),
            torch.autograd.set_detect_anomaly(config.debug),
        ):
            claim_output_dir(config, accelerator)
            yield


def check_setup(train: Callable[..., None], config: TrainConfig, accelerator: Accelerator) -> None:
    """Train a few steps, evaluate, save a checkpoint, and continue from it (`--quick`)."""
    config = quick_config(config)
    if accelerator.is_main_process:
        shutil.rmtree(config.output_dir, ignore_errors=True)
    accelerator.wait_for_everyone()
    train(config, accelerator, stop_after=2)
    accelerator.free_memory()
    train(config, accelerator)
    accelerator.print("The setup works: trained, evaluated, saved, continued.")
