"""Chooses the network interface on which gloo connects this machine to the others."""

from __future__ import annotations

import ipaddress
import os
import socket

import psutil
import torch.distributed as dist

from pointup.errors import ConfigError


def choose_interface(store: dist.Store) -> None:
    """Make gloo use the interface that reaches the other machines, unless the user has set one.

    By default gloo uses the interface of the host's own name. The /etc/hosts of Debian and Ubuntu
    maps that name to a loopback address, to which no other machine can connect. Every process of a
    group must call this.
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
    """The address of this machine on the route to `host`; sends nothing.

    Raises ConfigError if the host doesn't exist or has no route.
    """
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
