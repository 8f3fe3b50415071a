"""The exit status of train.py, and the network interface that reaches the other machines."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable

import psutil
import pytest
import torch.distributed as dist
from runs import training

from pointup.cli import main as cli
from pointup.errors import ConfigError
from pointup.training.distributed.process_group import (
    address_towards,
    choose_interface,
    interface_of,
)


@pytest.fixture
def first_of_two(monkeypatch) -> pytest.MonkeyPatch:
    """The environment of process 0 on the first of two machines, known to itself as 127.0.0.1."""
    settings = {"GROUP_WORLD_SIZE": "2", "WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    # Set, then removed, so that what is chosen is taken back after the test.
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    return monkeypatch


def chosen(store: dist.Store) -> str | None:
    choose_interface(store)
    return os.environ.get("GLOO_SOCKET_IFNAME")


def outside() -> tuple[str, str]:
    """An interface of this machine that isn't the loopback, and its address."""
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family == socket.AF_INET and not entry.address.startswith("127."):
                return name, entry.address
    pytest.skip("no network but the loopback")


def test_the_first_machine_uses_the_interface_that_reaches_the_last(first_of_two):
    name, address = outside()
    store = dist.HashStore()
    store.set("address", address)
    assert chosen(store) == name


def test_the_last_process_posts_its_address(first_of_two):
    name, address = outside()
    first_of_two.setenv("RANK", "1")
    first_of_two.setenv("MASTER_ADDR", address)
    store = dist.HashStore()
    assert chosen(store) == name
    assert store.get("address").decode() == address


@pytest.mark.parametrize("setting", [("GROUP_WORLD_SIZE", "1"), ("GLOO_SOCKET_IFNAME", "mine")])
def test_one_machine_and_an_interface_set_by_the_user_are_left_unchanged(first_of_two, setting):
    first_of_two.setenv(*setting)
    expected = setting[1] if setting[0] == "GLOO_SOCKET_IFNAME" else None
    assert chosen(dist.HashStore()) == expected


def test_a_machine_that_does_not_exist_is_named(monkeypatch):
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ConfigError, match=r"no route to node7 .*--main_process_ip"):
        address_towards("node7")


def test_the_loopback_has_an_interface_and_an_address_elsewhere_has_none():
    assert interface_of(address_towards("127.0.0.1")) in ("lo", "lo0")
    assert interface_of("192.0.2.1") is None


PROGRAMS = {
    "train.py": training.main,
    "pointup train": lambda args: cli.main(["train", *args]),
}
REFUSED = ["--noise-spacings", "-1"]


@pytest.fixture(params=PROGRAMS)
def prog(request) -> str:
    return str(request.param)


@pytest.fixture
def program(prog) -> Callable[[list[str]], int]:
    return PROGRAMS[prog]


def test_an_error_names_the_program(prog, program, capsys):
    assert program(REFUSED) == 1
    assert capsys.readouterr().err.startswith(f"{prog}: error: --noise-spacings is -1.0;")


def test_an_error_shows_its_origin_on_request(program, monkeypatch):
    monkeypatch.setenv("POINTUP_TRACEBACK", "1")
    with pytest.raises(ConfigError, match="--noise-spacings is -1"):
        program(REFUSED)


def test_the_help_of_a_reader_that_is_gone_ends_with_status_141(program, monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w", buffering=1) as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert program(["--help"]) == 141


_LEAVE_THE_GROUP = """
from pathlib import Path
import pointup.training.distributed.process_group
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
import torch.distributed.nn
dist.all_gather_object([None], "value")
dist.destroy_process_group()
print([thread for thread in Path("/proc/self/task").glob("*/comm") if "gloo" in thread.read_text()])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc lists the threads")
def test_a_process_that_left_the_group_has_no_thread_of_it():
    command = [sys.executable, "-c", _LEAVE_THE_GROUP]
    # gloo of torch 2.10 prints a line there.
    assert subprocess.run(command, capture_output=True).stdout.splitlines()[-1] == b"[]"
