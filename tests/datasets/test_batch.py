"""Collating samples into batches, and the worker processes of the loader."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from multiprocessing import active_children
from pathlib import Path

import psutil
import pytest
import torch
from accelerate.utils import send_to_device
from processes import shared_memory_of

from pointup.datasets.batch import collate
from pointup.datasets.opening import open_samples
from pointup.datasets.pair_dataset import PairDataset
from pointup.datasets.sampler import TokenBudgetBatchSampler
from pointup.processes import STOP_SIGNALS


@pytest.fixture
def samples(pair_directory) -> PairDataset:
    return PairDataset(open_samples(pair_directory, "train"), seed=3, augment=True)


def test_a_batch_concatenates_its_clouds(samples):
    chosen = [samples[(1, i)] for i in (4, 0, 9)]
    batch = collate(chosen)
    assert batch.num_graphs == 3
    assert batch.name == [sample.name for sample in chosen]
    assert batch.index.tolist() == [4, 0, 9]
    for b, sample in enumerate(chosen):
        assert torch.equal(batch.pos[batch.ptr[b] : batch.ptr[b + 1]], sample.pos)
        assert torch.equal(batch.pos[batch.batch == b], sample.pos)
        assert torch.equal(batch.target[batch.target_batch == b], sample.target)
        assert torch.equal(batch.target_normals[batch.target_batch == b], sample.target_normals)
        start, end = batch.target_ptr[b : b + 2]
        assert torch.equal(batch.target[start:end], sample.target)
        start, end = batch.resample_ptr[b : b + 2]
        assert torch.equal(batch.resample[start:end], sample.resample)


def test_a_sample_without_normals_or_resample_gets_zeros_and_no_points(samples):
    chosen = [samples[0], samples[1]]
    del chosen[1].resample, chosen[1].target_normals
    batch = collate(chosen)
    of_first = batch.target_batch == 0
    assert torch.equal(batch.target_normals[of_first], chosen[0].target_normals)
    assert not batch.target_normals[~of_first].any()
    assert batch.resample_ptr.tolist() == [0, len(chosen[0].resample), len(chosen[0].resample)]
    batch = collate(chosen[1:])
    assert "target_normals" not in batch
    assert "resample" not in batch
    assert "resample_ptr" not in batch


def test_the_samples_of_a_generator_are_collated_like_those_of_a_list(samples):
    assert collate(samples[i] for i in (4, 0)).index.tolist() == [4, 0]


def test_an_empty_list_of_samples_makes_an_empty_batch():
    batch = send_to_device(collate([]), torch.device("cpu"), non_blocking=True)
    assert batch.num_graphs == 0
    assert batch.pos.shape == batch.target.shape == (0, 3)
    assert batch.pos.dtype == torch.float32
    assert batch.ptr.tolist() == batch.target_ptr.tolist() == [0]
    assert batch.batch.dtype == batch.target_batch.dtype == batch.index.dtype == torch.int64


def test_all_tensors_of_a_batch_move_to_the_device(samples):
    batch = send_to_device(collate([samples[0], samples[1]]), torch.device("meta"))
    tensors = {name: value for name, value in batch.to_dict().items() if torch.is_tensor(value)}
    assert len(tensors) == 10
    assert all(tensor.device.type == "meta" for tensor in tensors.values())
    assert batch.num_graphs == 2


def test_workers_make_the_same_batches_as_the_process_itself(samples, loader):
    sampler = TokenBudgetBatchSampler(samples.sizes, 1000, accumulation_steps=2, seed=1)
    loaders = [loader(samples, sampler, num_workers) for num_workers in (0, 2)]
    for epoch in (0, 1):
        sampler.set_epoch(epoch)
        alone, by_workers = map(list, loaders)
        assert len(alone) == len(by_workers) == len(sampler)
        for one, other in zip(alone, by_workers, strict=True):
            assert one.name == other.name
            assert torch.equal(one.pos, other.pos)
            assert torch.equal(one.target, other.target)


def test_workers_for_a_device_come_from_a_fork_server_and_make_the_same_batches(samples, loader):
    sampler = TokenBudgetBatchSampler(samples.sizes, 1000, seed=1)
    meta = torch.device("meta")
    from_server = loader(samples, sampler, num_workers=2, device=meta)
    alone, by_workers = list(loader(samples, sampler)), list(from_server)
    # As after a lowered budget: a new loader in the place of the old one.
    again = list(loader(samples, sampler, num_workers=1, device=meta))
    assert len(alone) == len(by_workers) == len(again) == len(sampler)
    for one, *others in zip(alone, by_workers, again, strict=True):
        assert all(torch.equal(one.pos, other.pos) for other in others)
    assert from_server.multiprocessing_context.get_start_method() == "forkserver"
    assert loader(samples, sampler, num_workers=2).multiprocessing_context is None


def test_signals_leave_the_fork_server_and_its_workers_alive(samples, loader):
    others = active_children()
    keys = [[(0, i)] for i in range(40)]
    batches = iter(loader(samples, keys, num_workers=2, device=torch.device("meta")))
    workers = [child.pid for child in active_children() if child not in others]
    (server,) = {psutil.Process(worker).ppid() for worker in workers}
    assert server != os.getpid() and len(workers) == 2
    for number in STOP_SIGNALS:
        for process in (server, *workers):
            os.kill(process, number)
    assert len(list(batches)) == 40


def test_errors_and_deaths_of_workers_from_a_fork_server_are_reported_at_once(samples, loader):
    meta = torch.device("meta")
    with pytest.raises(IndexError):
        next(iter(loader(samples, [[(0, 10**6)]], num_workers=1, device=meta)))
    others = active_children()
    batches = iter(loader(samples, [[(0, 0)]] * 500, num_workers=1, device=meta))
    next(batches)
    (worker,) = (child for child in active_children() if child not in others)
    os.kill(worker.pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        list(batches)
    assert time.monotonic() - began < 60, "the timeout is 300 s"


SCRIPT = """
import os, signal, sys, time
from multiprocessing import active_children
from pointup.datasets.batch import make_loader
from pointup.datasets.opening import open_samples
from pointup.datasets.pair_dataset import PairDataset

# One process for each ending, of a session of its own: launchers signal whole groups of processes.
endings = {}
for ending in sys.argv[2:]:
    endings[ending] = os.fork()
    if not endings[ending]:
        os.setsid()
        break
else:
    for ending, pid in endings.items():
        print(ending, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    os._exit(0)
samples = PairDataset(open_samples(sys.argv[1], "train"))
batches = iter(make_loader(samples, [[(0, i)] for i in range(40)] * 10, num_workers=2))
# The workers have just been forked and may not yet have installed their handlers.
workers = [child.pid for child in active_children()]
for worker in workers:
    os.kill(worker, signal.SIGTERM)
    os.kill(worker, signal.SIGINT)
for _ in range(30):
    next(batches)
os.write(1, b"workers %d %d\\n" % tuple(workers))
if ending == "exception":
    raise RuntimeError("the step failed")
if ending == "interrupt":
    os.killpg(0, signal.SIGINT)
    time.sleep(60)
"""


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="shared memory is no directory here")
@pytest.mark.slow
def test_workers_ignore_signals_and_leave_nothing_after_an_exit_an_exception_or_ctrl_c(
    pair_directory,
):
    expected = {"end": 0, "exception": 1, "interrupt": -signal.SIGINT}
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, pair_directory, *expected],
        capture_output=True,
        text=True,
        timeout=120,
    )
    reported = [line.split() for line in ended.stdout.splitlines()]
    assert {word[0]: int(word[1]) for word in reported if word[0] in expected} == expected, (
        ended.stderr
    )
    workers = [pid for words in reported if words[0] == "workers" for pid in words[1:]]
    assert len(workers) == 6 and not any(Path(f"/proc/{pid}").exists() for pid in workers)
    assert "the step failed" in ended.stderr
    assert shared_memory_of(set(map(int, workers))) == set()
