"""Forms the process group, again at every restart; its key-value store; the status it ends with."""

from __future__ import annotations

import ipaddress
import logging
import os
import platform
import socket
import zlib
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import psutil
import torch
import torch.distributed as dist

# If this module is imported after the group is formed, its functions keep the group as a default
# argument: gloo's threads outlive it, and one that frees a tensor while the interpreter ends aborts
# the process.
import torch.distributed.nn.functional

from pointup.errors import ConfigError, PointupError, TrainingError
from pointup.terminal import print_error, status_with_output
from pointup.training.distributed.preemption import EXIT_INTERRUPTED

logger = logging.getLogger("pointup")

LAUNCHED_WITH = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables that a launcher sets for several processes, beside WORLD_SIZE."""
STORE_SECONDS = 30.0
"""Timeout of the store."""


def world_size() -> int:
    """Number of launched processes; raises ConfigError if WORLD_SIZE is not a positive number."""
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"WORLD_SIZE is {text!r}; unset it, or start by `accelerate launch`")
    return int(text)


def join_group(collective_timeout_minutes: float) -> None:
    """Form the process group that the launcher's environment describes; none for one process.

    The launcher's store outlives an attempt of `--max_restarts` (pytorch #135712): each attempt
    uses its own keys. Raises TrainingError if the processes can't connect.
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
            f"process {os.environ['RANK']} on {platform.node()} can't connect to the others "
            f"({str(error).splitlines()[0]}); start the command on every machine, and check the "
            "network between them with `accelerate test` under the same launcher"
        ) from error


def connect_store(
    timeout: timedelta = timedelta(seconds=STORE_SECONDS), may_serve: bool = False
) -> dist.Store | None:
    """A new connection to the store of this attempt; None for a single process.

    A client handles one call at a time, so a thread beside the training needs its own connection.
    With `may_serve` the first process hosts the store if the launcher doesn't.
    """
    if world_size() == 1:
        return None
    launcher_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if launcher_serves:
        # The store exists already, or the launcher is gone.
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


def exit_status(program: Callable[[], None], prog: str) -> int:
    """Run a training program that is called `prog`; returns its exit status.

    0: success; 1: a PointupError or ValueError, printed in one line on stderr, or raised with
    POINTUP_TRACEBACK=1; EXIT_INTERRUPTED: interrupted during the start; or PIPE_CLOSED.
    """
    return status_with_output(partial(_status, program, prog))


def _status(program: Callable[[], None], prog: str) -> int:
    try:
        program()
    except (PointupError, ValueError) as error:
        if os.environ.get("POINTUP_TRACEBACK"):
            raise
        # The log of the process has the traceback.
        logger.debug("the run ends with an error", exc_info=True)
        message = f"{prog}: error: {error}"
        if not is_printed(message):
            print_error(message)
        return 1
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED  # During the start there is nothing to save.
    return 0


def is_printed(message: str) -> bool:
    """Whether another process of the group has printed this message; then this one need not."""
    try:
        store = connect_store(timedelta(seconds=2))
        return bool(store and store.add(f"error_{zlib.crc32(message.encode())}", 1) > 1)
    except (RuntimeError, KeyError, ValueError, ConfigError):
        return False


def choose_interface(store: dist.Store) -> None:
    """Make gloo use the interface that reaches the other machines, unless the user has set one.

    By default gloo uses the interface of the host's own name, which the /etc/hosts of Debian and
    Ubuntu maps to a loopback address, to which no other machine can connect.
    """
    if int(os.environ.get("GROUP_WORLD_SIZE", 1)) == 1 or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    address = address_towards(os.environ["MASTER_ADDR"])
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        store.set("address", address)
    if ipaddress.ip_address(address).is_loopback:
        # The first machine resolves its own name to loopback. The last process is on another one.
        address = address_towards(store.get("address").decode())
    name = interface_of(address)
    if name is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = name


def address_towards(host: str) -> str:
    """The address of this machine on the route to `host`; ConfigError if there is none."""
    try:
        kind, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"{socket.gethostname()} has no route to {host} ({error.strerror}); check "
            "--main_process_ip and the network"
        ) from error


def interface_of(address: str) -> str | None:
    """The interface that has this address; None if the system reports none."""
    for name, addresses in psutil.net_if_addrs().items():
        # A link-local address comes with the interface's name, as in fe80::1%eth0.
        if any(entry.address.split("%")[0] == address.split("%")[0] for entry in addresses):
            return name
    return None
