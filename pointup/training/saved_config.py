"""The config.json of a run: options that the run was started with, and what may change later."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from pointup.errors import ConfigError
from pointup.training.config import TrainConfig, as_dict, flattened
from pointup.training.renamed_options import with_current_options
from pointup.training.run_directory.checkpoint import has_checkpoints

logger = logging.getLogger("pointup")

MAY_CHANGE = frozenset(
    {
        "output_dir", "num_workers", "worker_timeout", "log_every", "eval_every", "save_every",
        "keep_checkpoints", "log_with", "num_pictures", "patience", "target_chamfer",
        "collective_timeout", "hang_timeout", "on_save_error", "accumulation_steps", "debug",
        "quick", "gradient_checkpointing", "found_token_budget",
    }
)  # fmt: skip
"""Fields that a continued run may change freely: they don't alter what is learned.

Accumulation steps count as slots, their product with the number of processes.
"""
MAY_CHANGE_SAID = {"slots", "token_budget", "max_clouds", "mixed_precision", "cpu_threads"}
"""Fields that a continued run may change, with a warning: hardware may change under a run. The
clouds that remain of the epoch are planned anew, each still seen exactly once. Sums depend in their
last digits on the number of threads."""


def claim_output_dir(config: TrainConfig, accelerator: Accelerator) -> None:
    """Save the config in the run's directory, or check that the run there has the same one.

    A run is what has saved a checkpoint: options that a start without one left there are replaced.
    Raises ConfigError, on every process, naming the first field that differs.
    """
    path = config.output_dir / "config.json"
    slots = accelerator.num_processes * config.accumulation_steps
    now = {**as_dict(config), "slots": slots, "mixed_precision": accelerator.mixed_precision}
    if accelerator.device.type == "cpu":
        now["cpu_threads"] = torch.get_num_threads()
    is_run = has_checkpoints(config.output_dir / "checkpoints")
    try:
        saved = read_config(path)
        if saved is not None:
            check_same_run(saved, now, path)
        elif is_run:
            logger.warning("%s is missing: options are not compared with the run's", path)
    except ConfigError as error:
        if is_run or path.is_dir():
            raise
        saved = None
        logger.warning("%s; no checkpoint was saved with these options: replaced", error)
    if saved is not None and config.token_budget == "auto" and "found_token_budget" in saved:
        now["found_token_budget"] = saved["found_token_budget"]
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        write_config(path, now)
    accelerator.wait_for_everyone()


def read_config(path: Path) -> dict[str, Any] | None:
    """The options that a run was started with; None where there is no such file.

    Raises ConfigError, naming it, for a file that holds something else.
    """
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error)
    else:
        if isinstance(saved, dict):
            return with_current_options(saved)
        reason = f"it holds {json.dumps(saved):.40}"
    raise ConfigError(
        f"{path}: holds no options of a run ({reason}); remove it to go on with those of this "
        "command"
    )


def write_config(path: Path, values: Mapping[str, Any]) -> None:
    """Replace a run's config.json, which holds the old values or the new ones at any moment.

    Raises ConfigError, naming it, when the disk is full or read-only.
    """
    temporary = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(values, indent=2) + "\n")
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(
            f"{path}: can't be written ({error.strerror}); free the disk, or give another "
            "--output-dir"
        ) from error


def check_same_run(saved: Mapping[str, Any], now: Mapping[str, Any], path: Path) -> None:
    """Refuse to continue a run with other options, naming the first that differs.

    A run of another version of pointup may lack an option, and then had its default, or have one
    that is not known here, which the log says.
    """
    before, after = flattened(saved), flattened(now)
    defaults = flattened(as_dict(TrainConfig()))
    for name in sorted(before.keys() | after.keys()):
        if name in MAY_CHANGE:
            continue
        if name not in after:
            if name not in MAY_CHANGE_SAID:
                logger.warning("%s: %s is no option of this version: left out", path, name)
            continue
        was = before.get(name, defaults.get(name, after[name]))
        if was == after[name]:
            continue
        if name in MAY_CHANGE_SAID:
            logger.warning("%s changed from %s to %s", name, was, after[name])
        else:
            default = "" if name in before else " by default"
            raise ConfigError(
                f"{path}: the run there has {name} {was}{default}, not {after[name]}; "
                "give the same to continue it, or another --output-dir"
            )
