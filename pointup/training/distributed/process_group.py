"""The group of processes: formed anew at every restart, with a store beside its collectives."""

from __future__ import annotations

import logging
import os
import platform
import zlib
from datetime import timedelta

import torch
import torch.distributed as dist

from pointup.errors import ConfigError, TrainingError
from pointup.terminal import print_error
from pointup.training.distributed.network_interface import choose_interface

logger = logging.getLogger("pointup")

LAUNCHED_WITH = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What a launcher tells each of several processes, beside their number."""
STORE_SECONDS = 30.0
"""Time within which the store answers, or is taken for dead."""


def world_size() -> int:
    """How many processes were launched; ConfigError where the environment tells no number."""
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"WORLD_SIZE is {text!r}; unset it, or start by `accelerate launch`")
    return int(text)


def join_group(collective_timeout_minutes: float) -> None:
    """Form the process group that the launcher's environment describes, unless it is of one.

    `--max_restarts` alone fails at every restart: the launcher's store outlives the attempt, and
    the new processes read the addresses of the dead ones from it (pytorch #135712). Here every
    attempt has keys of its own. Raises TrainingError when the processes don't meet.
    """
    if world_size() == 1 or dist.is_initialized():
        return
    lacking = [name for name in LAUNCHED_WITH if name not in os.environ]
    if lacking:
        raise ConfigError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but {', '.join(lacking)} is not set: start "
            "several processes by `accelerate launch`, or unset WORLD_SIZE for one"
        )
    on_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1", "yes")
    device = None if on_cpu else torch.accelerator.current_accelerator(check_available=True)
    timeout = timedelta(minutes=collective_timeout_minutes)
    try:
        store = connect_store(timeout, may_serve=True)
        assert store is not None
        if device is None:
            choose_interface(store)
        dist.init_process_group(
            backend="gloo" if device is None else dist.get_default_backend_for_device(device),
            store=dist.PrefixStore("group", store),
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=timeout,
        )
    except RuntimeError as error:
        raise TrainingError(
            f"process {os.environ['RANK']} on {platform.node()} does not meet the others "
            f"({str(error).splitlines()[0]}); start the command on every machine, and see to the "
            "network between them: `-m pointup doctor` under the same launcher checks it"
        ) from error


def connect_store(
    timeout: timedelta = timedelta(seconds=STORE_SECONDS), may_serve: bool = False
) -> dist.Store | None:
    """A connection of its own to the store of this attempt; None for a process alone.

    A client answers one call at a time, so that a thread beside the training needs another one
    than the collectives. With `may_serve` the first process keeps the store where the launcher
    doesn't.
    """
    if world_size() == 1:
        return None
    launcher_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if launcher_serves:
        # It is there already, or the launcher is gone.
        timeout = min(timeout, timedelta(seconds=2 * STORE_SECONDS))
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=may_serve and not launcher_serves and os.environ["RANK"] == "0",
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"attempt_{attempt}", store)


def report_error(message: str) -> None:
    """Print on stderr what ended this process; what several processes have in common, once.

    The log of the process gets the traceback.
    """
    logger.debug("the run ends with an error", exc_info=True)
    try:
        store = connect_store(timedelta(seconds=2))
        said = store.add(f"error_{zlib.crc32(message.encode())}", 1) > 1 if store else False
    except (RuntimeError, KeyError, ValueError, ConfigError):
        said = False
    if not said:
        print_error(message)
