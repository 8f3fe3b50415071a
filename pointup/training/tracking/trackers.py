"""Starts the trackers of a run: TensorBoard by pointup itself, the others by Accelerate."""

from __future__ import annotations

from accelerate import Accelerator

from pointup.training.config import TrainConfig, as_dict, flattened
from pointup.training.tracking.tensorboard import TAGS, TensorBoardRun
from pointup.training.tracking.wandb_run import WandbRun

PROJECT = "pointup"
"""Name of the project in trackers."""


def start_trackers(
    accelerator: Accelerator, config: TrainConfig, resume_step: int
) -> tuple[TensorBoardRun | None, WandbRun | None]:
    """Start the trackers of `accelerator`, on the main process only.

    Points of TensorBoard after `resume_step` are removed. Returns the runs of TensorBoard and of
    Weights & Biases; None for one that is not among them.
    """
    # `--quick` uses a subdirectory of the Accelerator's output directory.
    accelerator.project_configuration.logging_dir = str(config.output_dir)
    name = config.output_dir.resolve().name
    # Without a checkpoint all steps are purged, else those after the checkpoint.
    purge_step = resume_step + 1 if resume_step else 0
    names = accelerator.log_with
    values = {
        key: value if isinstance(value, (bool, int, float, str)) else str(value)
        for key, value in flattened(as_dict(config)).items()
    }
    # TensorBoard names a run by its directory, the others by project and run.
    others = [each for each in names if getattr(each, "value", each) != "tensorboard"]
    accelerator.log_with = others
    try:
        accelerator.init_trackers(
            PROJECT, init_kwargs={"wandb": {"name": name, "dir": str(config.output_dir)}}
        )
    finally:
        accelerator.log_with = names
    wandb = None
    for tracker in accelerator.trackers:
        tracker.store_init_configuration(values)
        if tracker.name == "wandb":
            best = [TAGS["share_of_midpoints"], TAGS["chamfer"]]
            wandb = WandbRun(tracker.tracker, best)
    if len(others) == len(names):
        return None, wandb
    tensorboard = TensorBoardRun(config.output_dir, purge_step)
    accelerator.trackers.append(tensorboard.tracker)
    tensorboard.start(values)
    return tensorboard, wandb
