"""Worker processes of `pointup prepare`: order, errors, and workers that die."""

from __future__ import annotations

import os
import time
from functools import partial

import pytest

from pointup import processes
from pointup.errors import DataError, PointupError
from pointup.processes import call_each


def slow_square(number: int) -> tuple[int, int]:
    time.sleep(0.05 * (number % 3 == 0))
    if number == 5:
        raise DataError("five")
    return number**2, os.getpid()


def die() -> None:
    os._exit(1)


def test_results_and_errors_are_in_the_order_of_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "SECONDS_ALONE", 0.08)
    results = list(call_each([partial(slow_square, i) for i in range(20)], num_workers=2))
    assert str(results.pop(5)) == "five"
    squares = [result[0] for result in results if not isinstance(result, PointupError)]
    assert squares == [i**2 for i in range(20) if i != 5]
    # The first call ran in this process, the last one in a worker.
    pids = [result[1] for result in results if not isinstance(result, PointupError)]
    assert pids[0] == os.getpid() != pids[-1]


def test_one_worker_runs_all_calls_in_this_process() -> None:
    results = list(call_each([partial(slow_square, i) for i in range(4)], num_workers=1))
    assert results == [(i**2, os.getpid()) for i in range(4)]


def test_a_worker_that_dies_raises_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "SECONDS_ALONE", 0.0)
    with pytest.raises(PointupError, match="--num-workers"):
        list(call_each([die, die], num_workers=2))
