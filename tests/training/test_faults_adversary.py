"""A random adversary: twenty disturbances of a run, which ends like the undisturbed run.

Each start has one or two processes, for the same two slots.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import metrics_of
from disturbed import PATIENCE, ends, has_ended, launched, output_of
from safetensors.torch import load_file

from pointup.training.run_directory.checkpoint import LATEST, latest_checkpoint, step_of

STEPS = 90
LENGTH = ("--steps", STEPS, "--eval-every", 5, "--save-every", 2)
NUM_DISTURBANCES = 20
DETERMINISTIC = (
    "step", "epoch", "loss", "learning_rate", "grad_norm", "num_clouds", "num_tokens",
    "share_of_midpoints", "validation",
)  # fmt: skip
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
ENDING = ("kill the tree", "kill a rank", "kill the launcher", *(s.name for s in SIGNALS))
BETWEEN = ("empty LATEST", "remove LATEST", "half a line", "a stray file", "a damaged lock")


@pytest.fixture
def run_on_small_disk(tmp_path) -> Iterator[tuple[Path, bool]]:
    """The directory of a run, and whether it is on a separate disk of 8 MB."""
    run = tmp_path / "run"
    run.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(run)]
    is_mounted = not subprocess.run(mount, capture_output=True).returncode
    yield run, is_mounted
    if is_mounted:
        subprocess.run(["umount", "--lazy", str(run)], check=True)


def last_step(run: Path) -> int:
    """The step of the last complete line of metrics."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(json.loads((run / "metrics.jsonl").read_text().split("\n")[-2])["step"])
    return 0


def wait_for_more(run: Path, steps: int, process: subprocess.Popen[str]) -> None:
    """Wait until a start has done this many steps since it continued, or has ended."""
    found = latest_checkpoint(run / "checkpoints")
    goal = min(STEPS, (step_of(found) if found else 0) + steps)
    began = time.monotonic()
    while process.poll() is None and last_step(run) < goal:
        assert time.monotonic() - began < PATIENCE, output_of(run)
        time.sleep(0.02)


def fill_the_disk(run: Path) -> None:
    """Fill the disk of a run for about two steps."""
    filler = run / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    time.sleep(0.8)
    filler.unlink()


def end(what: str, process: subprocess.Popen[str], run: Path, chance: random.Random) -> None:
    """Kill a run or end it by a signal, and check that no process of it is left."""
    with contextlib.suppress(psutil.NoSuchProcess):
        launcher = psutil.Process(process.pid)
        ranks = launcher.children()
        if what == "kill the tree":
            for member in [launcher, *launcher.children(recursive=True)]:
                member.kill()
        elif what == "kill a rank" and ranks:
            chance.choice(ranks).kill()
        elif what == "kill the launcher":
            launcher.kill()
        elif what in signal.Signals.__members__:
            # The launcher forwards signals, except for SIGUSR1, which would end it.
            known = [] if what == "SIGUSR1" else [launcher]
            if targets := ranks + known:
                chance.choice(targets).send_signal(signal.Signals[what])
    assert has_ended(time.time(), 240, run, f"adversary: {what}"), output_of(run)


def meddle(what: str, run: Path) -> bool:
    """Damage a file of a run; returns whether there was one."""
    checkpoints, metrics = run / "checkpoints", run / "metrics.jsonl"
    if what == "a damaged lock":
        (run / "lock").write_bytes(b"\xff" * 10)
        return True
    if not (checkpoints / LATEST).exists():
        return False
    if what == "half a line":
        with metrics.open("a") as file:
            file.write('{"step": 3, "los')
    elif what == "empty LATEST":
        (checkpoints / LATEST).write_text("")
    elif what == "remove LATEST":
        (checkpoints / LATEST).unlink()
    elif what == "a stray file":
        next_step = last_step(run) // 2 * 2 + 2
        names = (f"step_{next_step}", f"step_{next_step + 2}.tmp")
        free = [name for name in names if not (checkpoints / name).exists()]
        for name in free:
            (checkpoints / name).write_text("stray")
        return bool(free)
    return True


def result_of(run: Path) -> dict[str, Any]:
    """The results of a run: weights, optimizer, best model, and its metrics in order."""
    last = run / "checkpoints" / f"step_{STEPS}"
    saved = torch.load(last / "optimizer.pt", weights_only=True)["optimizer"]
    state = json.loads((last / "state.json").read_text())
    return {
        "weights": load_file(last / "model.safetensors"),
        "optimizer": saved["state"],
        "settings": saved["param_groups"],
        "best": load_file(run / "model" / "model.safetensors"),
        "score": state["best"],
        "sampler": state["sampler"],
        "metrics": [
            {name: line[name] for name in DETERMINISTIC if name in line} for line in metrics_of(run)
        ],
    }


def assert_same(expected: Any, actual: Any, where: str = "") -> None:
    if isinstance(expected, torch.Tensor):
        assert torch.equal(expected, actual), where
    elif isinstance(expected, dict):
        assert expected.keys() == actual.keys(), where
        for name in expected:
            assert_same(expected[name], actual[name], f"{where}.{name}")
    else:
        assert expected == actual, where


@pytest.fixture(scope="module")
def in_peace(pair_directory, tmp_path_factory) -> dict[str, Any]:
    """The results of the undisturbed run."""
    run = tmp_path_factory.mktemp("peace") / "run"
    ends(pair_directory, run, *LENGTH)
    return result_of(run)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_twenty_random_disturbances_do_not_change_the_results_of_a_run(
    pair_directory, run_on_small_disk, in_peace, seed
):
    run, can_be_full = run_on_small_disk
    chance = random.Random(seed)
    # Every kind once, in random order, then random kinds.
    kinds = [*ENDING, *BETWEEN, *(["a full disk"] if can_be_full else [])]
    chance.shuffle(kinds)
    kinds += [chance.choice(kinds) for _ in range(NUM_DISTURBANCES - len(kinds))]
    done: Counter[str] = Counter()
    while kinds:
        num_processes = chance.choice((1, 2))
        with launched(
            pair_directory, run, *LENGTH, "--accumulation-steps", 2 // num_processes,
            num_processes=num_processes, num_workers=chance.choice((0, 1)), STEP_SECONDS="0.3",
        ) as process:  # fmt: skip
            if chance.random() < 0.15:
                time.sleep(5 * chance.random())  # Amid the start.
            else:
                wait_for_more(run, chance.randint(1, 4), process)
                time.sleep(0.4 * chance.random())
            while kinds and kinds[0] == "a full disk":
                fill_the_disk(run)
                done[kinds.pop(0)] += 1
            ending = next((kind for kind in kinds if kind in ENDING), chance.choice(ENDING))
            if ending in kinds:
                kinds.remove(ending)
            assert process.poll() is None, f"over before it was disturbed: {output_of(run)}"
            end(ending, process, run, chance)
            done[ending] += 1
        while kinds and kinds[0] in BETWEEN and meddle(kinds[0], run):
            done[kinds.pop(0)] += 1
    ends(pair_directory, run, *LENGTH)
    assert sum(done.values()) >= NUM_DISTURBANCES, done
    print(f"seed {seed}, {sum(done.values())} disturbances: {dict(done)}")
    assert_same(in_peace, result_of(run))
