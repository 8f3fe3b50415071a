"""The network interface by which this machine reaches the others of a group."""

from __future__ import annotations

import ipaddress
import os
import socket

import psutil
import torch.distributed as dist

from pointup.errors import ConfigError


def choose_interface(store: dist.Store) -> None:
    """Have gloo use the interface that leads to the other machines, unless the user named one.

    Left alone, gloo takes that of the host's own name, for which the /etc/hosts of Debian and
    Ubuntu has a loopback address: no other machine can connect to it. Every process of a group
    must call this.
    """
    if int(os.environ.get("GROUP_WORLD_SIZE", 1)) == 1 or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    address = address_towards(os.environ["MASTER_ADDR"])
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        store.set("address", address)
    if ipaddress.ip_address(address).is_loopback:
        # The first machine knows itself by such an address. The last process is on another one.
        address = address_towards(store.get("address").decode())
    name = interface_of(address)
    if name is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = name


def address_towards(host: str) -> str:
    """This machine's own address on the way to another one; nothing is sent.

    Raises ConfigError when there is no such host, or no way to it.
    """
    try:
        kind, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as way:
            way.connect(target)
            return str(way.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"{socket.gethostname()} has no way to {host} ({error.strerror}); see to "
            "--main_process_ip and to the network"
        ) from error


def interface_of(address: str) -> str | None:
    """The interface that has this address; None where the system doesn't tell."""
    for name, addresses in psutil.net_if_addrs().items():
        # A link-local address comes with the interface's name, as in fe80::1%eth0.
        if any(entry.address.split("%")[0] == address.split("%")[0] for entry in addresses):
            return name
    return None
