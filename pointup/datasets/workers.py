"""Runs calls in worker processes, for `pointup prepare`; results are in the order of the calls.

Built on `concurrent.futures`. Neither its `Executor.map` (before Python 3.14) nor joblib's
`return_as="generator"` waits for the consumer: in a trial joblib had finished all 200 calls while
the consumer held one result, and results of surveys may be larger than memory together.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import islice
from multiprocessing import active_children, get_all_start_methods, get_context
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from threading import current_thread, main_thread
from types import FrameType
from typing import NoReturn, TypeVar

from pointup.errors import PointupError

STOP_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
"""Ctrl-C; `kill` and batch systems; a closed terminal. Windows has no SIGHUP."""


@contextmanager
def stopping_as_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt at the first of STOP_SIGNALS; ignore further ones during clean-up.

    Signals that were ignored before, such as SIGHUP under nohup, stay ignored. Does nothing outside
    the main thread.
    """

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        for other in handlers:
            signal.signal(other, signal.SIG_IGN)
        raise KeyboardInterrupt

    handlers = {} if current_thread() is not main_thread() else _handlers()
    try:
        for number in handlers:
            signal.signal(number, stop)
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Defer STOP_SIGNALS to the end of the block, where the previous handler gets the first one.

    Does nothing outside the main thread.
    """
    received: list[int] = []
    handlers = {} if current_thread() is not main_thread() else _handlers()
    try:
        for number in handlers:
            signal.signal(number, lambda number, frame: received.append(number))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in received[:1]:
            signal.raise_signal(number)


def _handlers() -> dict[int, signal._HANDLER]:
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    return {
        number: handler
        for number, handler in handlers.items()
        # None if the handler was not installed from Python.
        if handler not in (signal.SIG_IGN, None)
    }


def start_fork_server() -> None:
    """Start the fork server of multiprocessing, unless it runs, with `STOP_SIGNALS` blocked.

    They reach the whole process group; without its server, workers end. Processes from the server
    start with these signals blocked. Not for Windows.
    """
    from multiprocessing import forkserver, resource_tracker

    # The server starts the tracker, which unblocks the signals, unless it runs.
    resource_tracker.ensure_running()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


Result = TypeVar("Result")
# Workers take some seconds to start. Short work is finished before they are ready.
SECONDS_ALONE = 2.0
# The fork server imports these modules once for all workers.
PRELOADED = ["pointup.datasets.meshes", "pointup.datasets.block_pairs"]
# Workers ignore these signals, because this process ends them.
IGNORED_SIGNALS = tuple(number for number in STOP_SIGNALS if number != signal.SIGTERM)


def call_each(
    calls: Iterable[Callable[[], Result]], num_workers: int
) -> Iterator[Result | PointupError]:
    """Yield the result of each call, or the PointupError that it raised, in the order of the calls.

    This process begins alone, and starts workers after `SECONDS_ALONE`; with one worker it runs all
    calls. Workers are at most 3 * num_workers calls ahead of the consumer, so that results don't
    accumulate. Calls must be picklable: `functools.partial` of an importable function. Raises
    PointupError if a worker dies. If the consumer stops or is interrupted, the workers are
    terminated.
    """
    todo = iter(calls)
    alone_until = time.monotonic() + SECONDS_ALONE
    while num_workers <= 1 or time.monotonic() < alone_until:
        for call in islice(todo, 1):
            yield _attempt(call)
            break
        else:
            return
    context = _context()
    others = active_children()
    pool = ProcessPoolExecutor(num_workers, mp_context=context, initializer=_start_worker)
    running: deque[Future[Result | PointupError]] = deque()
    try:
        with interrupts_held_back():
            running.extend(pool.submit(_attempt, call) for call in islice(todo, 3 * num_workers))
        while running:
            result = running.popleft().result()
            running.extend(pool.submit(_attempt, call) for call in islice(todo, 1))
            yield result
    except BrokenProcessPool as error:
        raise PointupError(
            "a worker process died, perhaps for lack of memory: try fewer --num-workers"
        ) from error
    except BaseException:
        # The running calls may take minutes, and their results are not needed.
        end_workers_except(others)
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def end_workers_except(others: Sequence[BaseProcess]) -> None:
    """Terminate the child processes of this process except `others`, and wait for their end."""
    workers = [worker for worker in active_children() if worker not in others]
    for worker in workers:
        worker.terminate()
    for worker in workers:
        worker.join()


def _context() -> BaseContext:
    # Forking can deadlock in a process with threads, and torch and Arrow start threads.
    if "forkserver" not in get_all_start_methods():
        return get_context("spawn")
    # Imported here, because Windows has no fork server.
    from multiprocessing import forkserver

    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    # Ctrl-C and a closed terminal reach the whole process group. The server and its workers inherit
    # the ignored signals, so that they don't print a traceback each.
    if current_thread() is main_thread():
        with interrupts_held_back():
            handlers = {number: signal.signal(number, signal.SIG_IGN) for number in IGNORED_SIGNALS}
            forkserver.ensure_running()
            for number, handler in handlers.items():
                signal.signal(number, handler)
    return context


def _attempt(call: Callable[[], Result]) -> Result | PointupError:
    try:
        return call()
    except PointupError as error:
        return error


def _start_worker() -> None:
    import torch

    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
