"""Preemption: stops a run at its next step after a signal or the death of its launcher."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import psutil

from pointup.processes import STOP_SIGNALS
from pointup.terminal import print_error

# Windows, where `pointup upsample` imports this module, has no SIGUSR1.
SIGNALS = (*STOP_SIGNALS, *([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else []))
ECHO_SECONDS = 0.7
"""A second SIGINT within this time counts as the first one, because Ctrl-C reaches a process from
its terminal and from its launcher."""
EXIT_INTERRUPTED = 130
LAUNCHER = os.getppid()
"""Parent process at the import of this module, early in the start."""
LAUNCHER_WORDS = ("python", "accelerate", "torchrun")
"""Words in the command line of a launcher, in contrast to that of a process that adopts orphans."""
LAUNCHER_VARIABLES = ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION")
"""Environment variables that a launcher sets for its processes."""


class StopRequest:
    """Whether a stop was requested, by a signal of `SIGNALS` or by the death of the launcher.

    It only records the request: the processes share it in the reduction of their next step, save,
    and end together. A second SIGINT ends the process at once. After the death of the launcher the
    processes end within `grace_seconds` even if no step completes.
    """

    def __init__(self, grace_seconds: float = 30.0) -> None:
        self.grace_seconds = grace_seconds
        self.requested_by: str | None = None
        self.requested_at = 0.0
        self.released, self.stack = threading.Event(), ExitStack()

    @property
    def requested(self) -> bool:
        return self.requested_by is not None

    def __enter__(self) -> StopRequest:
        with ExitStack() as stack:
            stack.callback(self.released.set)
            stack.enter_context(watching_launcher(self.stop_without_launcher))
            # Python sets signal handlers in the main thread only.
            if threading.current_thread() is threading.main_thread():
                # Handlers run between two bytecodes of the main thread, which may wait in a
                # collective forever. The wakeup socket delivers the number of the signal at once.
                receiver, sender = socket.socketpair()
                start_thread("signals", partial(self.listen, receiver))
                stack.enter_context(sender).setblocking(False)
                stack.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(sender.fileno()))
                for number in SIGNALS:
                    # A process started by nohup must outlive its terminal.
                    if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                        stack.callback(
                            signal.signal, number, signal.signal(number, lambda *_: None)
                        )
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()

    def listen(self, receiver: socket.socket) -> None:
        with receiver:
            while numbers := receiver.recv(64):
                # Other numbers are of signals that libraries handle.
                for number in set(numbers) & {*SIGNALS}:
                    self.request(signal.Signals(number).name)

    def request(self, name: str) -> None:
        """Request a stop; `name` is the signal or another reason."""
        now = time.monotonic()
        if name == self.requested_by == "SIGINT" and now - self.requested_at > ECHO_SECONDS:
            end_at_once(EXIT_INTERRUPTED, "second interrupt: ended without saving")
        self.requested_by, self.requested_at = name, now

    def stop_without_launcher(self) -> None:
        self.request("the launcher's death")
        if not self.released.wait(self.grace_seconds):
            end_at_once(1, "the launcher is gone, and no step has completed since")


@contextmanager
def watching_launcher(when_gone: Callable[[], None]) -> Iterator[None]:
    """Call `when_gone`, in a thread, if the launcher of this process ends within the block."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.5):
            if launcher_is_gone():
                when_gone()
                break

    if any(name in os.environ for name in LAUNCHER_VARIABLES):
        start_thread("launcher", watch)
    try:
        yield
    finally:
        ended.set()


def launcher_is_gone() -> bool:
    """Whether the process that started this one has ended, even before this module's import."""
    parent = os.getppid()
    if parent != LAUNCHER:
        return True
    try:
        name, command = psutil.Process(parent).name(), psutil.Process(parent).cmdline()
    except psutil.Error:
        return False  # Hidden from this user; the parent changes when the launcher dies.
    # In a container the launcher itself may be process 1.
    adopts = parent == 1 or name == "systemd"
    return adopts and not any(word in " ".join(command) for word in LAUNCHER_WORDS)


def start_thread(name: str, target: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    return thread


def end_at_once(status: int, message: str) -> None:
    """End this process and its data workers now, even if the main thread is blocked."""
    if message:
        print_error(message)
    for worker in multiprocessing.active_children():
        worker.kill()
    os._exit(status)
