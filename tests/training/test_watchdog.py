"""What the watchdog calls a hang, and what it does when its store stops answering."""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from pointup.training.faults import watchdog
from pointup.training.faults.watchdog import EXIT_HUNG, Heartbeat, Observation, Watchdog


class VanishingStore:
    """Answers a few calls, then none, like the store of a host that lost power."""

    def __init__(self, calls: int) -> None:
        self.calls = calls
        self.released = threading.Event()

    def answer(self) -> None:
        self.calls -= 1
        if self.calls < 0:
            self.released.wait(60)

    def set(self, key: str, value: str) -> None:
        self.answer()

    def check(self, keys: list[str]) -> bool:
        self.answer()
        return False

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.answer()
        heartbeats = [
            Heartbeat(1, 7, 3, "reduction", 4711, "host0"),
            Heartbeat(1, 7, 3, "reduction", os.getpid(), platform.node()),
        ]
        return [json.dumps(heartbeat).encode() for heartbeat in heartbeats]


def test_a_store_that_stops_answering_blocks_no_process(monkeypatch):
    store = VanishingStore(calls=4)
    ended: list[tuple[int, str]] = []
    monkeypatch.setattr(watchdog, "connect_store", lambda: store)
    monkeypatch.setattr(watchdog, "SECONDS_FOR_STACKS", 0.5)
    monkeypatch.setattr(watchdog, "STORE_SECONDS", 0.5)
    monkeypatch.setattr(watchdog.os, "_exit", lambda status: None)
    accelerator: Any = SimpleNamespace(
        process_index=1, num_processes=2, wait_for_everyone=lambda: None
    )
    with Watchdog(accelerator, hang_timeout=1.0) as dog:

        def end(status: int, text: str) -> None:
            ended.append((status, text))
            dog.closed.set()

        monkeypatch.setattr(watchdog, "end_at_once", end)
        dog.enter_phase("reduction")
        began = time.monotonic()
        assert dog.closed.wait(30)
        assert time.monotonic() - began > 0.5
    store.released.set()
    ((status, text),) = ended
    assert status == EXIT_HUNG
    first = text.splitlines()[0]
    assert first.startswith("train.py: error: the training hangs: process 0 stopped; check host0,")
    assert "Stacks of process 1" in text


NOW, TIMEOUT = 1000.0, 300.0
WORKS, WAITS = "evaluation", "gathering the evaluation"


def is_hung(*processes: tuple[str, float, float]) -> bool:
    """The verdict on processes of which are known: their phase, the seconds that they have been in
    it, and those since their last heartbeat."""
    seen = {
        rank: Observation(Heartbeat(9, 40, 500, phase, 10, "host"), NOW - silence, NOW - seconds)
        for rank, (phase, seconds, silence) in enumerate(processes)
    }
    accelerator: Any = SimpleNamespace(process_index=0, num_processes=len(processes))
    return Watchdog(accelerator, TIMEOUT).is_hung(seen, NOW)


def test_a_process_that_waits_for_one_that_makes_progress_is_no_hang():
    assert not is_hung((WORKS, 2, 0), (WAITS, 301, 0))
    assert not is_hung((WORKS, 299, 0), (WAITS, 900, 0), ("reduction", 301, 0))


def test_a_process_that_makes_no_progress_is_a_hang():
    assert is_hung((WORKS, 301, 0), (WAITS, 310, 0))
    assert is_hung((WORKS, 2, 0), ("forward and backward", 301, 0))
    assert is_hung((WORKS, 301, 0))


def test_processes_that_all_wait_for_each_other_are_a_hang():
    assert is_hung((WAITS, 301, 0), (WAITS, 301, 0))
    assert not is_hung((WAITS, 301, 0), (WAITS, 299, 0))


def test_a_process_without_heartbeat_is_a_hang_where_it_waits_too():
    assert is_hung((WORKS, 2, 0), (WAITS, 301, 301))
    assert not is_hung((WORKS, 2, 0), (WAITS, 299, 299))


class SharedStore(dict[str, str]):
    """A store that two processes share."""

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def multi_get(self, keys: list[str]) -> list[str]:
        return [self[key] for key in keys]


@pytest.mark.parametrize("fails", [False, True])
def test_a_process_that_ended_hangs_no_other_unless_it_failed(monkeypatch, fails):
    store = SharedStore()
    ended: list[str] = []
    monkeypatch.setattr(watchdog, "connect_store", lambda: store)
    accelerators: list[Any] = [
        SimpleNamespace(process_index=rank, num_processes=2, wait_for_everyone=lambda: None)
        for rank in range(2)
    ]
    first, second = (Watchdog(each, hang_timeout=0.5) for each in accelerators)
    monkeypatch.setattr(first, "end", lambda seen, now: ended.append("hung"))
    monkeypatch.setattr(second, "end", lambda seen, now: None)
    store.set(second.key("heartbeat"), json.dumps(second.heartbeat()))
    with first:
        with suppress(ZeroDivisionError), second:
            time.sleep(0.2)
            if fails:
                raise ZeroDivisionError
        for _ in range(15):
            if ended:
                break
            first.enter_phase("calibration")
            time.sleep(0.1)
    assert bool(ended) == fails


class SlowStore(VanishingStore):
    """Answers each call after 1.5 seconds, as on a machine with far too many processes."""

    def answer(self) -> None:
        time.sleep(1.5)


@pytest.mark.slow
def test_no_thread_is_left_in_a_call_to_the_store_at_the_end(monkeypatch):
    monkeypatch.setattr(watchdog, "connect_store", lambda: SlowStore(0))
    accelerator: Any = SimpleNamespace(
        process_index=1, num_processes=2, wait_for_everyone=lambda: None
    )
    with Watchdog(accelerator, hang_timeout=60.0):
        time.sleep(1.1)  # The thread now waits for the store.
    assert not {"heartbeats", "watchdog"} & {thread.name for thread in threading.enumerate()}
