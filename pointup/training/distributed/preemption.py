"""Asked to stop: by a signal, once for a tidy end at the next step, twice for an immediate one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

import psutil

from pointup.terminal import print_error

SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")
ECHO_SECONDS = 0.7
"""Time within which a second SIGINT is the first one again: a Ctrl-C reaches a process both from
its terminal and from its launcher."""
EXIT_INTERRUPTED = 130
LAUNCHER = os.getppid()
"""Process that started this one, as of the import of this module, early in the start."""
MAY_LAUNCH = ("python", "accelerate", "torchrun")
"""Words in the command of a launcher, by which one is told from what adopts orphans."""
LAUNCHERS = ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION")
"""Variables that tell a process that a launcher started it."""


class StopRequest:
    """Whether this process was asked to stop by a signal of `SIGNALS`, or its launcher's death.

    As a context manager it takes these signals over and gives them back at the end. The request
    is only noted: the processes agree on it in the reduction of their next step, save, and end
    together. A second SIGINT ends at once. A launcher that dies leaves nothing running: its
    processes are asked to stop, and end in any case within `grace_seconds`.
    """

    def __init__(self, grace_seconds: float = 30.0) -> None:
        self.grace_seconds = grace_seconds
        self.asked_by: str | None = None
        self.asked_at = 0.0
        self.over = threading.Event()
        self.previous: dict[int, object] = {}
        self.previous_wakeup = -1
        self.sockets: tuple[socket.socket, socket.socket] | None = None

    @property
    def asked(self) -> bool:
        return self.asked_by is not None

    def __enter__(self) -> StopRequest:
        self.over.clear()
        # Python sets signal handlers in the main thread alone.
        if threading.current_thread() is threading.main_thread():
            # Handlers run between two bytecodes of the main thread, which may be waiting in a
            # collective for ever. The number of the signal comes through a socket at once.
            self.sockets = socket.socketpair()
            self.sockets[1].setblocking(False)
            self.previous_wakeup = signal.set_wakeup_fd(self.sockets[1].fileno())
            start_thread("signals", self.listen)
            for name in SIGNALS:
                number = getattr(signal, name, None)
                # What was started by nohup is to outlive its terminal.
                if number and (name != "SIGHUP" or signal.getsignal(number) != signal.SIG_IGN):
                    self.previous[number] = signal.signal(number, ignore_here)
        if any(name in os.environ for name in LAUNCHERS):
            start_thread("launcher", self.watch_launcher)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.over.set()
        for number, handler in self.previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self.previous = {}
        if self.sockets is not None:
            signal.set_wakeup_fd(self.previous_wakeup)
            self.sockets[1].close()
            self.sockets = None

    def listen(self) -> None:
        assert self.sockets is not None
        receiver = self.sockets[0]
        with receiver:
            while numbers := receiver.recv(64):
                for number in numbers:
                    # A data worker, forked from this process, writes its signals here too.
                    if number in self.previous:
                        self.note(signal.Signals(number).name)

    def note(self, name: str) -> None:
        """Ask to stop, for the reason of this name."""
        now = time.monotonic()
        if name == self.asked_by == "SIGINT" and now - self.asked_at > ECHO_SECONDS:
            end_at_once(EXIT_INTERRUPTED, "interrupted twice: ended without saving")
        self.asked_by, self.asked_at = name, now

    def watch_launcher(self) -> None:
        while not self.over.wait(1.0):
            if launcher_is_gone():
                self.note("the launcher's death")
                if not self.over.wait(self.grace_seconds):
                    end_at_once(1, "the launcher is gone, and no step was ended since")
                return


def launcher_is_gone() -> bool:
    """Whether the process that started this one has ended, be it before this one could look."""
    parent = os.getppid()
    if parent != LAUNCHER:
        return True
    # In a container the launcher itself may be the first process.
    try:
        name, command = psutil.Process(parent).name(), psutil.Process(parent).cmdline()
    except psutil.Error:
        return False  # Hidden from this user: the parent changes when the launcher dies.
    adopts = parent == 1 or name == "systemd"
    return adopts and not any(word in " ".join(command) for word in MAY_LAUNCH)


@contextmanager
def ending_with_launcher() -> Iterator[None]:
    """End this process when its launcher dies during a start, before there is anything to save.

    What waits for the launcher's store would else do so for many minutes.
    """
    over = threading.Event()

    def watch() -> None:
        while not launcher_is_gone():
            if over.wait(0.5):
                return
        if not over.is_set():
            end_at_once(1, "the launcher is gone, and training has not begun")

    if any(name in os.environ for name in LAUNCHERS):
        start_thread("launcher", watch)
    try:
        yield
    finally:
        over.set()


def ignore_here(number: int, frame: FrameType | None) -> None:
    """The handler proper: what is to be done is done by `StopRequest.listen`."""


def start_thread(name: str, target: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    return thread


def end_at_once(status: int, message: str) -> None:
    """End this process and its data workers now, whatever its main thread is doing."""
    if message:
        print_error(message)
    for worker in multiprocessing.active_children():
        worker.kill()
    os._exit(status)
