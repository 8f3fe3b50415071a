"""Worker processes, and the signals that stop a program: Ctrl-C, `kill`, a closed terminal."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import islice
from multiprocessing import active_children, get_all_start_methods, get_context, parent_process
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from threading import Thread, current_thread, main_thread
from types import FrameType
from typing import NoReturn, TypeVar

from pointup.errors import PointupError

STOP_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
"""Ctrl-C; `kill` and batch systems; a closed terminal. Windows has no SIGHUP."""

Result = TypeVar("Result")
# Workers take some seconds to start. Short work is finished before they are ready.
SECONDS_ALONE = 2.0


def call_each(
    calls: Iterable[Callable[[], Result]],
    num_workers: int,
    remedy: str = "perhaps for lack of memory: try fewer --num-workers",
) -> Iterator[Result | PointupError]:
    """Yield the result of each call, or the PointupError that it raised, in the order of the calls.

    This process begins alone, and starts workers after `SECONDS_ALONE`; with one worker it runs all
    calls. Workers are at most 3 * num_workers calls ahead of the consumer, so that results don't
    accumulate. Calls must be picklable: `functools.partial` of an importable function. Raises
    PointupError, with the `remedy`, if a worker dies. If the consumer stops or is interrupted, the
    workers are terminated.
    """
    # Neither `Executor.map` (before Python 3.14) nor joblib's `return_as="generator"` waits for the
    # consumer, and the results of surveys may be larger than memory together.
    todo = iter(calls)
    alone_until = time.monotonic() + SECONDS_ALONE
    while num_workers <= 1 or time.monotonic() < alone_until:
        for call in islice(todo, 1):
            yield _attempt(call)
            break
        else:
            return
    first = list(islice(todo, 3 * num_workers))
    if not first:
        return
    others = active_children()
    context = from_fork_server("torch", getattr(first[0], "func", first[0]).__module__)
    pool = ProcessPoolExecutor(num_workers, mp_context=context, initializer=_start_worker)
    running: deque[Future[Result | PointupError]] = deque()
    try:
        with interrupts_held_back():
            running.extend(pool.submit(_attempt, call) for call in first)
        while running:
            result = running.popleft().result()
            running.extend(pool.submit(_attempt, call) for call in islice(todo, 1))
            yield result
    except BrokenProcessPool as error:
        raise PointupError(f"a worker process died, {remedy}") from error
    except BaseException:
        # The running calls may take minutes, and their results are not needed.
        end_workers_except(others)
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def results_of(
    calls: Iterable[Callable[[], Result]], num_workers: int, **options: str
) -> Iterator[Result]:
    """The results of `call_each`; raises the first PointupError instead."""
    for result in call_each(calls, num_workers, **options):
        if isinstance(result, PointupError):
            raise result
        yield result


def end_workers_except(others: Sequence[BaseProcess]) -> None:
    """Terminate the child processes of this process except `others`, and wait for their end."""
    workers = [worker for worker in active_children() if worker not in others]
    for worker in workers:
        worker.terminate()
    for worker in workers:
        worker.join()


def _attempt(call: Callable[[], Result]) -> Result | PointupError:
    try:
        return call()
    except PointupError as error:
        return error


def _start_worker() -> None:
    import torch

    ignore_signals(number for number in STOP_SIGNALS if number != signal.SIGTERM)
    end_with_parent()
    torch.set_num_threads(1)


def end_with_parent() -> None:
    """End this worker when the process that started it is gone, killed perhaps.

    The system's parent of a worker may be a fork server, which lives as long as its workers.
    """
    parent = parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        os._exit(1)

    Thread(target=wait, daemon=True).start()


def num_cores() -> int:
    """Number of cores that this process may use; a batch job may have fewer than the machine."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def from_fork_server(*modules: str) -> BaseContext:
    """A context whose processes are forked from a server that has imported the main module.

    The first call starts the server, which also imports `modules`. Its processes start with
    `STOP_SIGNALS` blocked and should call `ignore_signals`. On Windows processes are spawned.
    Raises PointupError if the server can't start.
    """
    # Forking can deadlock in a process with threads, and torch and Arrow start threads. Libraries
    # of devices, as CUDA and NCCL, must not be forked.
    if "forkserver" not in get_all_start_methods():
        return get_context("spawn")
    from multiprocessing import forkserver, resource_tracker

    context = get_context("forkserver")
    context.set_forkserver_preload(["__main__", *modules])
    # The server starts the tracker, which unblocks the signals, unless it runs.
    resource_tracker.ensure_running()
    # Stop signals reach the whole process group; without its server, workers end.
    with signals_blocked():
        try:
            forkserver.ensure_running()
        except OSError as error:
            raise PointupError(
                f"{tempfile.gettempdir()}: no process can be started from there ({error}); set "
                "TMPDIR to a short path of a folder that is writable"
            ) from error
    return context


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Block STOP_SIGNALS in this thread and in the processes that the block starts."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def ignore_signals(numbers: Iterable[int] = STOP_SIGNALS) -> None:
    """Ignore signals in a worker, because its parent process ends it; unblock STOP_SIGNALS."""
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


@contextmanager
def stopping_as_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt at the first of STOP_SIGNALS; ignore further ones during clean-up.

    Signals that were ignored before, such as SIGHUP under nohup, stay ignored. Does nothing outside
    the main thread.
    """

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        for other in STOP_SIGNALS:
            signal.signal(other, signal.SIG_IGN)
        raise KeyboardInterrupt

    with _handled_by(stop):
        yield


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Defer STOP_SIGNALS to the end of the block, where the previous handler gets the first one.

    Does nothing outside the main thread.
    """
    received: list[int] = []
    try:
        with _handled_by(lambda number, frame: received.append(number)):
            yield
    finally:
        for number in received[:1]:
            signal.raise_signal(number)


@contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    if current_thread() is not main_thread():
        before = {}
    # None if the handler was not installed from Python.
    before = {n: old for n, old in before.items() if old not in (signal.SIG_IGN, None)}
    try:
        for number in before:
            signal.signal(number, handler)
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
