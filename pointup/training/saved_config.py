"""config.json of a run: stores its options, and checks which of them a continued run changes."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from pointup.errors import ConfigError
from pointup.training.config import (
    TrainConfig,
    as_dict,
    data_sources,
    flattened,
    with_current_options,
)
from pointup.training.run_directory.checkpoint import has_checkpoints

logger = logging.getLogger("pointup")

MAY_CHANGE = frozenset(
    {
        "output_dir", "num_workers", "worker_timeout", "log_every", "eval_every", "save_every",
        "save_minutes", "keep_checkpoints", "log_with", "num_pictures", "patience",
        "target_chamfer", "collective_timeout", "hang_timeout", "on_save_error",
        "accumulation_steps", "debug", "quick", "gradient_checkpointing", "found_token_budget",
        "model.heights",
    }
)  # fmt: skip
"""Fields that a continued run may change silently, because they don't alter what is learned.

Accumulation steps are compared as `slots`: accumulation steps times processes.
"""
MAY_CHANGE_WITH_WARNING = {"slots", "token_budget", "max_clouds", "mixed_precision", "cpu_threads"}
"""Fields that a continued run may change, with a warning, because it may move to other hardware.
The rest of the epoch is planned again, and each cloud is still seen exactly once. The number of
threads changes the last digits of sums."""


def claim_output_dir(config: TrainConfig, accelerator: Accelerator) -> None:
    """Write config.json into the run directory, or check that it fits the run to be continued.

    Only a directory with checkpoints counts as a run: options of a start that saved none are
    replaced. Raises ConfigError, on every process, naming the first field that differs.
    """
    path = config.output_dir / "config.json"
    slots = accelerator.num_processes * config.accumulation_steps
    now = {**as_dict(config), "slots": slots, "mixed_precision": accelerator.mixed_precision}
    if accelerator.device.type == "cpu":
        now["cpu_threads"] = torch.get_num_threads()
    is_run = has_checkpoints(config.output_dir / "checkpoints")
    try:
        saved = read_config(path)
    except ConfigError as error:
        if is_run or path.is_dir():
            raise
        saved = None
        logger.warning("%s; it is replaced", str(error).partition("; ")[0])
    if saved is None and is_run:
        logger.warning("%s is missing: the options of the run are not compared", path)
    elif saved is not None and is_run:
        check_same_run(saved, now, path)
    elif saved is not None and (difference := first_difference(saved, now, path)):
        name, was, _ = difference
        logger.warning(
            "%s of a start without a checkpoint (%s was %s) is replaced", path, name, was
        )
        saved = None
    if saved is not None and config.token_budget == "auto" and "found_token_budget" in saved:
        now["found_token_budget"] = saved["found_token_budget"]
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        write_config(path, now)
    accelerator.wait_for_everyone()


def read_config(path: Path) -> dict[str, Any] | None:
    """The options of a run, with their current names; None if the file doesn't exist.

    Raises ConfigError, naming the file, if it holds something else.
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
        f"{path}: holds no options of a run ({reason}); remove it to continue with the options of "
        "this command"
    )


def write_config(path: Path, values: Mapping[str, Any]) -> None:
    """Replace config.json of a run atomically.

    Raises ConfigError, naming the file, if the disk is full or read-only.
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
    """Raise ConfigError, naming the first difference, if a run would go on with other options."""
    if difference := first_difference(saved, now, path):
        name, was, value = difference
        raise ConfigError(
            f"{path}: the run there has {name} {was}, not {value}; "
            "give the same value to continue it, or another --output-dir"
        )


def first_difference(
    saved: Mapping[str, Any], now: Mapping[str, Any], path: Path
) -> tuple[str, str, Any] | None:
    """The first option that a continued run would change: name, value as text, new value.

    A run of another version of pointup may lack an option: then the default is compared. It may
    have an unknown option: then the log warns.
    """
    before, after = flattened(saved), flattened(now)
    defaults = flattened(as_dict(TrainConfig()))
    for name in sorted(before.keys() | after.keys()):
        if name in MAY_CHANGE:
            continue
        if name not in after:
            if name not in MAY_CHANGE_WITH_WARNING:
                logger.warning("%s: %s is no option of this version, and is ignored", path, name)
            continue
        was = before.get(name, defaults.get(name, after[name]))
        if was == after[name] or (name == "data" and same_data(was, after[name])):
            continue
        if name in MAY_CHANGE_WITH_WARNING:
            logger.warning("%s changed from %s to %s", name, was, after[name])
        else:
            return name, f"{was}{'' if name in before else ' by default'}", after[name]
    return None


def same_data(data: Any, other: Any) -> bool:
    """Whether two values of `--data` name the same datasets, in the same order and with the same
    weights, such as pairs and ./pairs/."""
    try:
        first, second = (
            [(Path(source.name).resolve(), source.weight) for source in data_sources(names)]
            for names in (data, other)
        )
    except (ConfigError, TypeError, AttributeError):  # A config.json can hold anything.
        return False
    return first == second
