"""Emulates hosts by Linux namespaces: each has a name, an address and a network interface.

The hosts reach only each other. They share this machine's files, except for `Host.mount`, and end
with the process that made them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from conftest import ROOT

SECONDS_TO_MAKE = 30
NEEDED = ("ip", "unshare", "nsenter", "mount", "hostname")


def why_not() -> str | None:
    """The reason why this machine can't make hosts; None if it can."""
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        return f"no {' and no '.join(missing)} to make hosts with"
    if not Path("/dev/net/tun").exists():
        return "no /dev/net/tun to make hosts with"
    made = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "ip", "tuntap", "add", "eth0", "mode", "tap"],
        capture_output=True, text=True,
    )  # fmt: skip
    return f"namespaces are not allowed: {made.stderr.strip()}" if made.returncode else None


@dataclass(eq=False)
class Host:
    """One host; an idle process keeps its namespaces alive."""

    number: int
    keeper: subprocess.Popen[str]
    outputs: Path
    """Directory of the output of its programs."""
    num_started: int = 0
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"10.0.0.{self.number + 1}"

    @property
    def network(self) -> Path:
        return Path(f"/proc/{self.keeper.pid}/ns/net")

    def words(self, *words: object) -> list[str]:
        enter = ["nsenter", "--target", self.keeper.pid, "--net", "--uts", "--mount"]
        return [str(word) for word in (*enter, "--", *words)]

    def run(self, *words: object) -> str:
        done = subprocess.run(
            self.words(*words), capture_output=True, text=True, timeout=SECONDS_TO_MAKE
        )
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout

    def start(self, *words: object, **environment: str) -> subprocess.Popen[str]:
        """Start a program in the root directory of the repository; `output` has its output."""
        self.num_started += 1
        with self.output_file.open("w") as file:
            program = subprocess.Popen(
                self.words("env", f"--chdir={ROOT}", *words),
                stdout=file, stderr=file, text=True, env={**os.environ, **environment},
            )  # fmt: skip
        self.started.append(program)
        return program

    @property
    def output_file(self) -> Path:
        return self.outputs / f"host{self.number}_{self.num_started}.txt"

    @property
    def output(self) -> str:
        return self.output_file.read_text()

    def mount(self, what: Path, where: Path) -> None:
        """Mount the directory or file `what` at `where`, on this host only."""
        self.run("mount", "--bind", what, where)

    def pids(self) -> list[int]:
        """Processes on this host, without its keeper."""
        own_network = self.network.stat().st_ino
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != self.keeper.pid:
                # An unreadable process has ended, or is no program of these tests.
                with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                    if (entry / "ns" / "net").stat().st_ino == own_network:
                        found.append(int(entry.name))
        return found

    def kill_all(self) -> None:
        """Kill every program of this host, as a power failure would."""
        while pids := self.pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for program in self.started:
                program.poll()  # Reaps the process, which otherwise stays a zombie.
            time.sleep(0.01)


class Network:
    """Hosts joined by a switch, which can delay or lose frames, or disconnect a host."""

    def __init__(self, hosts: list[Host], switch: subprocess.Popen[str]) -> None:
        self.hosts, self.switch = hosts, switch

    def tell_switch(self, *words: object) -> None:
        assert self.switch.stdin is not None
        self.switch.stdin.write(" ".join(map(str, words)) + "\n")
        self.switch.stdin.flush()
        assert self.answer() == "done"

    def answer(self) -> str:
        assert self.switch.stdout is not None
        return self.switch.stdout.readline().strip()

    def slow_down(self, delay: float, loss: float) -> None:
        """Delay every frame by `delay` seconds, and drop the share `loss` of all frames."""
        self.tell_switch("delay", delay)
        self.tell_switch("loss", loss)

    def cut(self, host: Host) -> None:
        """Silently drop all frames from and to this host."""
        self.tell_switch("cut", host.number)

    def join(self, host: Host) -> None:
        self.tell_switch("join", host.number)

    def lose_power(self, host: Host) -> None:
        """Disconnect a host and kill its programs, so that no other host is notified."""
        self.cut(host)
        host.kill_all()


@contextlib.contextmanager
def made_hosts(number: int, directory: Path) -> Iterator[Network]:
    """Make `number` hosts, `host0` at 10.0.0.1 and so on, with program output in `directory`."""
    if reason := why_not():
        pytest.skip(reason)
    with contextlib.ExitStack() as stack:
        hosts = []
        for i in range(number):
            # The keeper ends with its stdin, which closes when this process ends in any way.
            keeper = subprocess.Popen(
                ["unshare", "--net", "--uts", "--mount", "sh", "-c",
                 f"hostname host{i} && ip link set lo up && echo ready && read end"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            stack.callback(end, keeper)
            assert keeper.stdout is not None and keeper.stdout.readline() == "ready\n"
            hosts.append(Host(i, keeper, directory))
            stack.callback(hosts[-1].kill_all)
        switch = subprocess.Popen(
            [sys.executable, ROOT / "tests" / "switch.py", *(str(host.network) for host in hosts)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        stack.callback(end, switch)
        network = Network(hosts, switch)
        assert network.answer() == "ready"
        names = directory / "hosts"
        lines = [f"{host.address} host{host.number}" for host in hosts]
        names.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        for host in hosts:
            host.mount(names, Path("/etc/hosts"))
            host.run("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
            host.run("ip", "link", "set", "eth0", "up")
        yield network


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()
