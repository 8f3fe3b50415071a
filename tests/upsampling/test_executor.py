"""Threads of upsampling: their number beside an accelerator, and what they leave behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

from pointup.upsampling import executor as running
from pointup.upsampling.executor import host_threads, single_threaded_operations

GPU = torch.device("cuda", 0)


def test_beside_a_gpu_threads_follow_the_machine_and_its_processes(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    # A launcher for GPUs leaves torch one thread.
    assert host_threads(GPU, 1) == 64
    for processes, expected in ((8, 8), (16, 4), (64, 1), (100, 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
        assert host_threads(GPU, 1) == expected
    assert host_threads(torch.device("cpu"), 3) == 3


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("leaves_first", [0, 1])
def test_upsamplings_that_overlap_leave_the_settings_of_torch_as_they_were(leaves_first):
    used = torch.backends.mkldnn.enabled
    assert used or not torch.backends.mkldnn.is_available()
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        pools = [one, other]
        contexts = [single_threaded_operations() for _ in pools]

        def call(work: object) -> list[object]:
            return [pool.submit(work).result() for pool in pools]  # type: ignore[arg-type]

        for pool, context in zip(pools, contexts, strict=True):
            assert pool.submit(context.__enter__).result() == 3
        assert call(torch.get_num_threads) == [1, 1]
        for number in (leaves_first, 1 - leaves_first):
            assert not torch.backends.mkldnn.enabled
            pools[number].submit(contexts[number].__exit__, None, None, None).result()
        assert call(torch.get_num_threads) == [3, 3]
    with ThreadPoolExecutor(1) as later:
        assert later.submit(torch.get_num_threads).result() == 3
    assert torch.get_num_threads() == 3
    assert torch.backends.mkldnn.enabled == used


@pytest.mark.usefixtures("three_threads")
def test_threads_of_an_upsampling_stay_at_one_while_another_ends():
    numbers = []
    with single_threaded_operations():
        torch.set_num_threads(3)  # As an upsampling that ends does in its own thread.
        for _ in running._in_threads(lambda _: numbers.append(torch.get_num_threads()), [0, 1], 2):
            pass
    assert numbers == [1, 1]


@pytest.mark.parametrize("number", [0, 2, 3, 10, 12])
def test_threads_begin_far_from_each_other_and_do_each_item_once(number):
    first, all_begin = list[int](), Barrier(min(3, number) or 1, timeout=10)

    def work(item: int) -> None:
        if len(first) < all_begin.parties:
            first.append(item)
            all_begin.wait()

    assert sorted(running._in_threads(work, range(number), 3)) == list(range(number))
    share = -(-number // 3)
    assert sorted(first) == list(range(number))[:: share or 1]
