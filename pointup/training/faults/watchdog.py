"""Detects hangs and reports which process stopped, in which phase, with the stacks of all."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import math
import os
import platform
import signal
import sys
import threading
import time
import traceback
from typing import IO, NamedTuple

import torch.distributed as dist
from accelerate import Accelerator

from pointup.training.distributed.preemption import end_at_once, start_thread
from pointup.training.distributed.process_group import STORE_SECONDS, connect_store

logger = logging.getLogger("pointup")

EXIT_HUNG = 3
SECONDS_FOR_STACKS = 3.0
"""Time in which the other processes can post their stacks."""
WAITING_PHASES = ("reduction", "gathering the evaluation", "waiting for the checkpoint")
"""Phases in which a process waits for the others; it doesn't cause a hang there."""
ENDED = "ended"
"""Phase of a process that has finished its part of the run, and posts no more heartbeats."""


class Heartbeat(NamedTuple):
    """State of a process, which it posts every second."""

    number: int
    """Increases with every heartbeat, and stops when the process stops."""
    num_phases: int
    """Phases entered so far; increases while the training makes progress."""
    step: int
    phase: str
    pid: int
    host: str


class Observation(NamedTuple):
    """The last known state of a process, with times by the clock of the observing process."""

    heartbeat: Heartbeat
    heartbeat_at: float
    """Time of the last heartbeat."""
    phase_at: float
    """Time at which the process was first seen in its current phase."""


class Watchdog:
    """Ends a run in which some process has entered no phase for `hang_timeout` seconds.

    Waiting for others (`WAITING_PHASES`) may take longer, as long as another makes progress.
    The training sets `step` and calls `enter_phase`; a thread posts both to the launcher's store as
    heartbeats, and reads those of the others. If a process hangs, each writes the stacks of its
    threads to its log and to the store, the first live process reports on the terminal which
    process stopped, at which step and phase, and all end. Processes of the same machine kill one
    without heartbeat, so that no launcher waits for it. If the store is out of reach, each machine
    reports what it knows. A single process watches itself.
    """

    def __init__(self, accelerator: Accelerator, hang_timeout: float) -> None:
        self.accelerator, self.rank = accelerator, accelerator.process_index
        self.ranks = range(accelerator.num_processes)
        self.store: dist.Store | None = None
        self.hang_timeout = hang_timeout
        self.interval = min(1.0, hang_timeout / 8)
        self.num_heartbeats = 0
        self.step, self.num_phases, self.phase = 0, 0, "start"
        self.received: dict[int, Heartbeat] = {}
        self.hang_is_reported = False
        self.answered = -math.inf
        """Time of the store's last answer."""
        self.closed = threading.Event()
        self.threads: list[threading.Thread] = []
        handlers = logging.getLogger().handlers
        streams = (each.stream for each in handlers if isinstance(each, logging.FileHandler))
        self.log_file: IO[str] = next(filter(None, streams), sys.stderr)

    def __enter__(self) -> Watchdog:
        self.store = connect_store()
        if self.store is not None:
            self.store.set(self.key("heartbeat"), json.dumps(self.heartbeat()))
            self.accelerator.wait_for_everyone()
            self.threads.append(start_thread("heartbeats", self.exchange))
        self.threads.append(start_thread("watchdog", self.watch))
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self.enter_phase(ENDED)
        self.closed.set()
        # A thread that the interpreter's end interrupts in a call to the store aborts the process.
        deadline = time.monotonic() + STORE_SECONDS
        for thread in self.threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        faulthandler.cancel_dump_traceback_later()

    def enter_phase(self, phase: str) -> None:
        """Set the current phase of the training; every call counts as progress."""
        self.phase = phase
        self.num_phases += 1

    def key(self, name: str, rank: int | None = None) -> str:
        return f"{name}_{self.rank if rank is None else rank}"

    def heartbeat(self) -> Heartbeat:
        self.num_heartbeats += 1
        position = self.num_phases, self.step, self.phase
        return Heartbeat(self.num_heartbeats, *position, os.getpid(), platform.node())

    def watch(self) -> None:
        """Check all heartbeats until the training ends or hangs."""
        seen: dict[int, Observation] = {}
        woke = time.monotonic()
        while not self.closed.wait(self.interval):
            # If this thread is blocked too, a timer in C writes the stacks.
            faulthandler.dump_traceback_later(self.hang_timeout, file=self.log_file)
            if time.monotonic() - woke > self.hang_timeout / 2:
                # This process or its machine was suspended; the other processes did not hang.
                seen = {}
            woke = time.monotonic()
            for rank, heartbeat in (self.received | {self.rank: self.heartbeat()}).items():
                if heartbeat.phase == ENDED:  # The main process may still calibrate the model.
                    seen.pop(rank, None)
                    continue
                known, heartbeat_at, phase_at = seen.get(rank, (heartbeat, woke, woke))
                seen[rank] = Observation(
                    heartbeat,
                    heartbeat_at if known.number == heartbeat.number else woke,
                    phase_at if known.num_phases == heartbeat.num_phases else woke,
                )
            if self.is_hung(seen, woke):
                self.end(seen, woke)

    def exchange(self) -> None:
        """Post the heartbeat of this process and read those of all, until the store is gone, and
        once more at the end.

        This runs in its own thread: if the host of the store loses power, a call to the store
        never returns, whatever its timeout.
        """
        assert self.store is not None
        is_closed = False
        while not is_closed:
            is_closed = self.closed.wait(self.interval)
            try:
                self.store.set(self.key("heartbeat"), json.dumps(self.heartbeat()))
                texts = self.store.multi_get([self.key("heartbeat", rank) for rank in self.ranks])
                self.hang_is_reported = self.store.check(["hang"])
            except RuntimeError as error:
                logger.warning("the launcher's store is gone (%s)", str(error).splitlines()[0])
                self.answered = -math.inf
                return
            heartbeats = [Heartbeat(*json.loads(text)) for text in texts]
            self.received = dict(zip(self.ranks, heartbeats, strict=True))
            self.answered = time.monotonic()

    def is_hung(self, seen: dict[int, Observation], now: float) -> bool:
        late = [s for s in seen.values() if now - s.phase_at > self.hang_timeout]
        # A process may wait for another one that makes progress, however long that takes.
        stopped = any(
            s.heartbeat.phase not in WAITING_PHASES or is_dead(s, now, self.interval) for s in late
        )
        return stopped or 0 < len(late) == len(seen) or self.hang_is_reported

    def end(self, seen: dict[int, Observation], now: float) -> None:
        """Report the hang and end this process."""
        # The cause of the hang may block the report too: a full pipe, a lock, a file system.
        time_limit = threading.Timer(4 * SECONDS_FOR_STACKS, os._exit, [EXIT_HUNG])
        time_limit.daemon = True
        time_limit.start()
        store_answers = now - self.answered < max(3 * self.interval, SECONDS_FOR_STACKS)
        stacks = self.gather_stacks() if store_answers else {self.rank: stacks_of_threads()}
        text = report(seen, stacks, now, self.hang_timeout)
        print(f"\n{text}", file=self.log_file, flush=True)
        here = alive = {r for r, s in seen.items() if s.heartbeat.host == platform.node()}
        # Without the store, only the processes of this host are certain to end.
        if store_answers:
            alive = {r for r, s in seen.items() if not is_dead(s, now, self.interval)}
        for rank in here - alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(seen[rank].heartbeat.pid, signal.SIGKILL)
        end_at_once(EXIT_HUNG, text if self.rank == min(alive) else "")

    def gather_stacks(self) -> dict[int, str]:
        """Python stacks of every process that posts them in time."""
        stacks = {self.rank: stacks_of_threads()}
        if self.store is None:
            return stacks
        self.store.set(self.key("stacks"), stacks[self.rank])
        self.store.set("hang", "1")
        deadline = time.monotonic() + 2 * self.interval + SECONDS_FOR_STACKS
        while len(stacks) < len(self.ranks) and time.monotonic() < deadline:
            for rank in set(self.ranks) - stacks.keys():
                if self.store.check([self.key("stacks", rank)]):
                    stacks[rank] = self.store.get(self.key("stacks", rank)).decode()
            time.sleep(0.05)
        return stacks


def is_dead(observation: Observation, now: float, interval: float) -> bool:
    return now - observation.heartbeat_at > 3 * interval


def report(
    seen: dict[int, Observation], stacks: dict[int, str], now: float, hang_timeout: float
) -> str:
    """The report of a hang: the stopped processes, the state of all, and their stacks."""
    lines = []
    for rank, (heartbeat, heartbeat_at, phase_at) in sorted(seen.items()):
        state = f"step {heartbeat.step}, {heartbeat.phase}, for {now - phase_at:.0f} s"
        if rank not in stacks:
            state += f"; no heartbeat for {now - heartbeat_at:.0f} s"
        lines.append(f"  process {rank} (pid {heartbeat.pid} on {heartbeat.host}): {state}")
    stopped = [
        rank
        for rank, (heartbeat, _, phase_at) in seen.items()
        if now - phase_at > hang_timeout / 2
        and (heartbeat.phase not in WAITING_PHASES or rank not in stacks)
    ]
    who = " and ".join(f"process {rank}" for rank in stopped)
    cause = f"{who} stopped" if who else "all wait for each other; check the network between them"
    silent = {seen[rank].heartbeat.host for rank in stopped if rank not in stacks}
    if elsewhere := sorted(silent - {seen[rank].heartbeat.host for rank in stacks}):
        cause += f"; check {' and '.join(elsewhere)}, and the network between the hosts"
    lines.insert(0, f"train.py: error: the training hangs: {cause}")
    for rank, text in sorted(stacks.items()):
        lines.append(f"Stacks of process {rank}, innermost call last:\n{text}")
    return "\n".join(lines)


def stacks_of_threads() -> str:
    """Python stacks of all threads of this process, the main one first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    main = threading.main_thread().ident
    lines = []
    for ident in sorted(frames, key=lambda ident: ident != main):
        lines.append(f"  thread {names.get(ident, ident)}:\n")
        lines += traceback.format_stack(frames[ident])
    return "".join(lines).rstrip()
