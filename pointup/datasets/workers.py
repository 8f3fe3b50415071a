"""Many calls of functions in several processes, results in the order of the calls."""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing import active_children, forkserver, get_all_start_methods, get_context
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from threading import current_thread, main_thread
from typing import TypeVar

from pointup.datasets.interrupts import STOP_SIGNALS, interrupts_held_back
from pointup.errors import PointupError

Result = TypeVar("Result")
# Workers need some seconds to start; short work is done before they would be ready.
SECONDS_ALONE = 2.0
# What the fork server imports once, so that workers start with it.
PRELOADED = ["pointup.datasets.meshes", "pointup.datasets.surveys"]
# What workers ignore, since this process tells them when to end.
INHERITED = tuple(number for number in STOP_SIGNALS if number != signal.SIGTERM)


def call_each(
    calls: Iterable[Callable[[], Result]], num_workers: int
) -> Iterator[Result | PointupError]:
    """What each call returns, or the PointupError that it raised, in the order of the calls.

    This process begins alone and starts workers when it isn't done within seconds. They are never
    more than a few calls ahead of who takes the results, so that these don't pile up. Calls must
    pickle: `functools.partial` of a function that can be imported.
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
        # Nobody waits for what they are at, which may take minutes.
        end_workers_except(others)
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def end_workers_except(others: Sequence[BaseProcess]) -> None:
    """End the processes that this one has started, but for the `others`, and wait for their end."""
    workers = [worker for worker in active_children() if worker not in others]
    for worker in workers:
        worker.terminate()
    for worker in workers:
        worker.join()


def _context() -> BaseContext:
    # A forked copy of a process with threads, as torch and Arrow start them, can deadlock.
    if "forkserver" not in get_all_start_methods():
        return get_context("spawn")
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    # Ctrl-C and a closed terminal reach the whole process group; what the server inherits keeps it
    # and its workers from answering with a traceback each.
    if current_thread() is main_thread():
        with interrupts_held_back():
            handlers = {number: signal.signal(number, signal.SIG_IGN) for number in INHERITED}
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

    for number in INHERITED:
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
