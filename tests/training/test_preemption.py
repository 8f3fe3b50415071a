"""Preemption: stop requests by signals and by the death of the launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from pointup.training.distributed.preemption import StopRequest


def wait_until_requested(stop: StopRequest) -> None:
    deadline = time.monotonic() + 10
    while not stop.requested and time.monotonic() < deadline:
        time.sleep(0.005)
    assert stop.requested


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"])
def test_a_signal_is_recorded_and_the_handlers_are_restored(name):
    number = getattr(signal, name)
    # The tests may run under nohup, where SIGHUP is ignored.
    given = signal.signal(number, signal.default_int_handler)
    with StopRequest() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        wait_until_requested(stop)
        assert stop.requested_by == name
    assert signal.getsignal(number) == signal.default_int_handler
    signal.signal(number, given)


def test_two_sigints_in_quick_succession_count_as_one():
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        wait_until_requested(stop)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)


def test_a_second_sigint_ends_a_process_that_waits_in_native_code():
    code = (
        "import threading, ctypes\n"
        "from pointup.training.distributed.preemption import StopRequest\n"
        "lock = threading.Lock(); lock.acquire()\n"
        "with StopRequest():\n"
        "    print('ready', flush=True)\n"
        "    while True: ctypes.CDLL(None).pause(); ctypes.CDLL(None).sleep(100)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    time.sleep(1.0)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 130


def ended_after_its_launcher(code: str) -> subprocess.CompletedProcess[str]:
    """Run a process whose launcher ends one second after the process has written to `tell`."""
    launch = (
        "import os, time\n"
        "done, tell = os.pipe()\n"
        "if os.fork(): os.close(tell); os.read(done, 1); time.sleep(1); os._exit(0)\n"
    )
    began = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", launch + code],
        capture_output=True,
        text=True,
        env={**os.environ, "TORCHELASTIC_RUN_ID": "1"},
    )
    assert time.monotonic() - began < 30
    return ended


@pytest.mark.slow
def test_the_death_of_the_launcher_ends_a_start():
    ended = ended_after_its_launcher(
        "from pointup.training.distributed.accelerator import joined_group\n"
        "with joined_group(1.0): os.write(tell, b'.'); time.sleep(60)\n"
    )
    assert ended.stderr == "the launcher is gone, and training has not begun\n"


def test_the_death_of_the_launcher_requests_a_stop_and_then_ends_the_process():
    ended = ended_after_its_launcher(
        "from pointup.training.distributed.preemption import StopRequest\n"
        "with StopRequest(grace_seconds=1.0) as stop:\n"
        "    os.write(tell, b'.')\n"
        "    while not stop.requested: time.sleep(0.01)\n"
        "    print(stop.requested_by, flush=True)\n"
        "    time.sleep(60)\n"
    )
    assert ended.stdout == "the launcher's death\n"
    assert "the launcher is gone" in ended.stderr
