"""Many calls of a function in several processes, results in the order of the calls."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing import get_all_start_methods, get_context
from typing import TypeVar

from pointup.errors import PointupError

Result = TypeVar("Result")
# What the forkserver imports once, so that workers start with it.
PRELOADED = ["pointup.data.meshes", "pointup.data.surveys"]


def call_each(
    calls: Iterable[Callable[[], Result]], num_workers: int
) -> Iterator[Result | PointupError]:
    """What each call returns, or the PointupError that it raised, in the order of the calls.

    The processes are never more than a few calls ahead of who takes the results, so that these
    don't pile up. With one worker all happens in this process. Calls must pickle:
    `functools.partial` of a function that can be imported.
    """
    if num_workers <= 1:
        yield from map(_attempt, calls)
        return
    # A forked copy of a process with threads, as torch and Arrow start them, can deadlock.
    method = "forkserver" if "forkserver" in get_all_start_methods() else "spawn"
    context = get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(PRELOADED)
    pool = ProcessPoolExecutor(num_workers, mp_context=context, initializer=_start_worker)
    todo = iter(calls)
    running: deque[Future[Result | PointupError]] = deque()
    try:
        running.extend(pool.submit(_attempt, call) for call in islice(todo, 3 * num_workers))
        while running:
            result = running.popleft().result()
            running.extend(pool.submit(_attempt, call) for call in islice(todo, 1))
            yield result
    except BrokenProcessPool as error:
        raise PointupError(
            "a worker process died, perhaps for lack of memory: try fewer --num-workers"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _attempt(call: Callable[[], Result]) -> Result | PointupError:
    try:
        return call()
    except PointupError as error:
        return error


def _start_worker() -> None:
    import torch

    # Ctrl-C reaches the whole process group; the parent process alone answers it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
