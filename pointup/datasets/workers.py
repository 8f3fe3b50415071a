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
from itertools import islice
from multiprocessing import active_children, get_all_start_methods, get_context
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from threading import current_thread, main_thread
from typing import TypeVar

from pointup.datasets.interrupts import STOP_SIGNALS, interrupts_held_back
from pointup.errors import PointupError

Result = TypeVar("Result")
# Workers take some seconds to start. Short work is finished before they are ready.
SECONDS_ALONE = 2.0
# The fork server imports these modules once for all workers.
PRELOADED = ["pointup.datasets.meshes", "pointup.datasets.region_pairs"]
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
