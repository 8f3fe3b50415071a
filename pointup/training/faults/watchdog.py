"""A hang is found and explained: which process stopped, where, and what all of them were doing."""

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
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import IO, NamedTuple

import torch.distributed as dist
from accelerate import Accelerator

from pointup.training.distributed.preemption import end_at_once, start_thread
from pointup.training.distributed.process_group import connect_store

logger = logging.getLogger("pointup")

EXIT_HUNG = 3
SECONDS_FOR_STACKS = 3.0
"""How long the others are given to tell what they were doing."""
WAITING_PHASES = ("reduction", "gathering the evaluation", "waiting for the checkpoint")
"""Phases in which a process waits for the others, through no fault of its own."""


@dataclass(frozen=True)
class Heartbeat:
    """What a process tells the others about itself every second."""

    number: int
    """Grows with every heartbeat: stands still when the whole process does."""
    num_phases: int
    """Phases entered so far: stands still when the training does."""
    step: int
    phase: str
    pid: int
    host: str


class Observation(NamedTuple):
    """What one process knows of another, by its own clock."""

    heartbeat: Heartbeat
    heartbeat_at: float
    """When its heartbeat last changed."""
    phase_at: float
    """When its training last phase_at."""


class Watchdog:
    """Ends a run in which some process has not phase_at for `hang_timeout` seconds.

    The training tells it what it does: `step`, and `at(phase)`. A thread posts this to the store
    that the launcher keeps, beside the training, and hears what the others post. When a process
    falls behind, each writes the stacks of its threads to the log and to the store, the first one
    alive says on the terminal which stopped, at which step and phase, with the stacks of all, and
    all end. A process that gives no heartbeat is killed by those on its own machine, so that no
    launcher waits for it; should it only hold Python's lock, its log gets the stacks all the same.
    Where the store is out of reach, each machine tells what it knows. A process alone watches
    itself.
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
        """When the store last answered."""
        self.closed = threading.Event()
        self.log_file: IO[str] = next(
            (
                handler.stream
                for handler in logging.getLogger().handlers
                if isinstance(handler, logging.FileHandler) and handler.stream is not None
            ),
            sys.stderr,
        )

    def __enter__(self) -> Watchdog:
        self.store = connect_store()
        if self.store is not None:
            self.store.set(self.key("heartbeat"), json.dumps(asdict(self.heartbeat())))
            self.accelerator.wait_for_everyone()
            start_thread("heartbeats", self.exchange)
        self.thread = start_thread("watchdog", self.watch)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.closed.set()
        self.thread.join(1.0)
        faulthandler.cancel_dump_traceback_later()

    def enter_phase(self, phase: str) -> None:
        """Tell what the training does from now on; counts as a move."""
        self.phase = phase
        self.num_phases += 1

    def key(self, name: str, rank: int | None = None) -> str:
        return f"{name}_{self.rank if rank is None else rank}"

    def heartbeat(self) -> Heartbeat:
        self.num_heartbeats += 1
        where = self.num_phases, self.step, self.phase
        return Heartbeat(self.num_heartbeats, *where, os.getpid(), platform.node())

    def watch(self) -> None:
        """Watch all heartbeats, until the training is over or has to be ended."""
        seen: dict[int, Observation] = {}
        woke = time.monotonic()
        while not self.closed.wait(self.interval):
            # Should even this thread stand still, a timer in C writes the stacks.
            faulthandler.dump_traceback_later(self.hang_timeout, file=self.log_file)
            overslept = time.monotonic() - woke > self.hang_timeout / 2
            if overslept:
                # This process or its machine was halted for a while: nobody else is to blame.
                seen = {}
            woke = time.monotonic()
            for rank, heartbeat in (self.received | {self.rank: self.heartbeat()}).items():
                before = seen.get(rank)
                seen[rank] = Observation(
                    heartbeat,
                    woke
                    if before is None or before.heartbeat.number != heartbeat.number
                    else before.heartbeat_at,
                    woke
                    if before is None or before.heartbeat.num_phases != heartbeat.num_phases
                    else before.phase_at,
                )
            if self.is_hung(seen, woke):
                self.end(seen, woke)

    def exchange(self) -> None:
        """Post this process's heartbeat and hear everyone's, until the store is gone.

        In a thread of its own: where the host of the store is gone without a word, no call to it
        ever returns, whatever its timeout.
        """
        assert self.store is not None
        while not self.closed.wait(self.interval):
            try:
                self.store.set(self.key("heartbeat"), json.dumps(asdict(self.heartbeat())))
                texts = self.store.multi_get([self.key("heartbeat", rank) for rank in self.ranks])
                self.hang_is_reported = self.store.check(["hang"])
            except RuntimeError as error:
                logger.warning("the launcher's store is gone (%s)", str(error).splitlines()[0])
                self.answered = -math.inf
                return
            heartbeats = [Heartbeat(**json.loads(text)) for text in texts]
            self.received = dict(zip(self.ranks, heartbeats, strict=True))
            self.answered = time.monotonic()

    def is_hung(self, seen: dict[int, Observation], now: float) -> bool:
        if any(now - sighting.phase_at > self.hang_timeout for sighting in seen.values()):
            return True
        return self.hang_is_reported

    def end(self, seen: dict[int, Observation], now: float) -> None:
        """Say what is known about the hang and end this process."""
        # Whatever hangs may hang what this needs too: a full pipe, a lock, a file system.
        patience = threading.Timer(4 * SECONDS_FOR_STACKS, os._exit, [EXIT_HUNG])
        patience.daemon = True
        patience.start()
        store_answers = now - self.answered < max(3 * self.interval, SECONDS_FOR_STACKS)
        stacks = self.gather_stacks() if store_answers else {self.rank: stacks_of_threads()}
        text = report(seen, stacks, now, self.hang_timeout)
        print(f"\n{text}", file=self.log_file, flush=True)
        # Without the store nothing is known of the others; those of this host end like this one.
        here = {
            rank for rank, sighting in seen.items() if sighting.heartbeat.host == platform.node()
        }
        alive = here
        if store_answers:
            alive = {r for r, s in seen.items() if not is_dead(s, now, self.interval)}
        for rank in here - alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(seen[rank].heartbeat.pid, signal.SIGKILL)
        end_at_once(EXIT_HUNG, text if self.rank == min(alive) else "")

    def gather_stacks(self) -> dict[int, str]:
        """Python stacks of every process that tells them in time."""
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


def is_dead(sighting: Observation, now: float, interval: float) -> bool:
    return now - sighting.heartbeat_at > 3 * interval


def report(
    seen: dict[int, Observation], stacks: dict[int, str], now: float, hang_timeout: float
) -> str:
    """Which processes stopped, where all of them are, and the stacks they told."""
    lines = []
    for rank, (heartbeat, heartbeat_at, phase_at) in sorted(seen.items()):
        state = f"step {heartbeat.step}, {heartbeat.phase}, for {now - phase_at:.0f} s"
        if rank not in stacks:
            state += f"; no heartbeat for {now - heartbeat_at:.0f} s"
        lines.append(f"  process {rank} (pid {heartbeat.pid} on {heartbeat.host}): {state}")
    late = {r: s.heartbeat for r, s in seen.items() if now - s.phase_at > hang_timeout / 2}
    stopped = [
        r
        for r, heartbeat in late.items()
        if heartbeat.phase not in WAITING_PHASES or r not in stacks
    ]
    who = " and ".join(f"process {rank}" for rank in stopped)
    cause = f"{who} stopped" if who else "all wait for each other; see to the network between them"
    silent = {seen[rank].heartbeat.host for rank in stopped if rank not in stacks}
    if elsewhere := sorted(silent - {seen[rank].heartbeat.host for rank in stacks}):
        cause += f"; see to {' and '.join(elsewhere)}, and to the network between the hosts"
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
