"""An Ethernet switch in user space, which can delay and drop frames between hosts.

    python switch.py NAMESPACE...

Each namespace is a path like /proc/PID/ns/net; it gets a TAP interface eth0. Lines on stdin
configure it: `delay SECONDS` and `loss SHARE` for every frame, `cut NUMBER` and `join NUMBER` for
one host. The end of stdin ends the switch, and the interfaces with it.

It replaces the kernel's tc netem, which many kernels of virtual machines lack.
"""

from __future__ import annotations

import ctypes
import errno
import os
import random
import selectors
import struct
import sys
import time
from collections import deque
from pathlib import Path

TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000
CLONE_NEWNET = 0x40000000
MAX_FRAME = 65536
FRAMES_AT_ONCE = 64
LOST = (errno.EAGAIN, errno.EIO)
"""Errors of a write to a host whose queue is full or whose interface is down."""


def open_tap(namespace: str) -> int:
    """File descriptor of a new TAP interface eth0 in a network namespace."""
    import fcntl

    with Path("/proc/self/ns/net").open() as home, Path(namespace).open() as file:
        enter(file.fileno())
        tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH", b"eth0", IFF_TAP | IFF_NO_PI))
        enter(home.fileno())  # The switch must not be a process of the host, which may be killed.
    return tap


def enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


class Switch:
    """Forwards frames between hosts, with the delay, loss and cuts set so far."""

    def __init__(self, taps: list[int], seed: int = 0) -> None:
        self.taps = taps
        self.random = random.Random(seed)
        self.delay, self.loss = 0.0, 0.0
        self.is_cut = [False] * len(taps)
        self.ports: dict[bytes, int] = {}
        """Last known port of each Ethernet address."""
        self.under_way: deque[tuple[float, int, bytes]] = deque()
        """Frames in transit: time of arrival, port, bytes."""

    def obey(self, line: str) -> None:
        name, value = line.split()
        if name in ("cut", "join"):
            self.is_cut[int(value)] = name == "cut"
        elif name == "delay":
            self.delay = float(value)
        elif name == "loss":
            self.loss = float(value)
        else:
            raise ValueError(line)

    def receive(self, port: int) -> None:
        """Read frames from a host and queue them for their targets."""
        for _ in range(FRAMES_AT_ONCE):
            try:
                frame = os.read(self.taps[port], MAX_FRAME)
            except BlockingIOError:
                return
            target, source = frame[:6], frame[6:12]
            self.ports[source] = port
            others = [other for other in range(len(self.taps)) if other != port]
            for other in [self.ports[target]] if target in self.ports else others:
                if not self.is_cut[port] and self.random.random() >= self.loss:
                    self.under_way.append((time.monotonic() + self.delay, other, frame))

    def deliver(self) -> float | None:
        """Deliver the frames that are due; returns the seconds until the next one is."""
        while self.under_way:
            wait = self.under_way[0][0] - time.monotonic()
            if wait > 0:
                return wait
            _, port, frame = self.under_way.popleft()
            if not self.is_cut[port]:
                try:
                    os.write(self.taps[port], frame)
                except OSError as error:
                    if error.errno not in LOST:
                        raise
        return None


def main() -> None:
    switch = Switch([open_tap(namespace) for namespace in sys.argv[1:]])
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ)
    for port, tap in enumerate(switch.taps):
        selector.register(tap, selectors.EVENT_READ, port)
    print("ready", flush=True)
    while True:
        for key, _ in selector.select(switch.deliver()):
            if key.data is not None:
                switch.receive(key.data)
            elif line := sys.stdin.readline():
                switch.obey(line)
                print("done", flush=True)
            else:
                return


if __name__ == "__main__":
    main()
