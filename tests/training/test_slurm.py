"""The documented job script under a real SLURM of two hosts: it ends like an undisturbed run.

Skipped where SLURM isn't installed or hosts can't be made; see slurm.py and hosts.py.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT, SECONDS_TO_OUTCOME, metrics_of
from disturbed import arguments, assert_ends_like, wait_for_step
from slurm import Cluster, made_cluster
from test_hosts import on_cpus

pytestmark = pytest.mark.slow

PATIENCE = 900
NO_FAULT = {"FAULT": "none none 0 none"}


@pytest.fixture
def cluster(tmp_path) -> Iterator[Cluster]:
    with made_cluster(tmp_path) as made:
        yield made


def job_script(data: Path, run: str, **changes: str) -> str:
    """The script of the documentation, for CPUs, small data and a short time."""
    (script,) = re.findall(r"```bash\n(#!/bin/bash\n#SBATCH.*?)```", CLUSTERS, re.DOTALL)
    words = [word for word in arguments(data, Path("RUN"), "--num-workers", 0) if word != "RUN"]
    words.remove("--output-dir")
    for before, after in {
        "$(pointup config 2x8gpu)": str(data.parent / "hosts.yaml"),
        "-m pointup train --data pairs/ --token-budget auto --output-dir runs/long --epochs 200": (
            f"tests/faulty.py {shlex.join(words)} --output-dir {run}"
        ),
        "#SBATCH --cpus-per-task=64": "#SBATCH --cpus-per-task=1",
        "#SBATCH --mem=0\n": "",
        **changes,
    }.items():
        assert before in script, f"{before} is not in\n{script}"
        script = script.replace(before, after)
    return script


CLUSTERS = (ROOT / "docs" / "guides" / "clusters.md").read_text()


def has_ended(shown: dict[str, str]) -> bool:
    return shown["JobState"] in ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL")


def assert_completes(cluster: Cluster, job: int) -> None:
    cluster.wait(job, has_ended, PATIENCE)
    assert cluster.show(job)["JobState"] == "COMPLETED", cluster.output(job)


def assert_trains_to_the_end(cluster: Cluster, job: int) -> None:
    """Assert that a job succeeds and each of its starts was stopped or found a finished run."""
    assert_completes(cluster, job)
    shown = cluster.show(job)
    saved = r"Stopped at step \d+ and saved; run again to continue|^next: "
    starts = re.findall(saved, cluster.output(job), re.MULTILINE)
    assert len(starts) == int(shown["Restarts"]) + 1


@pytest.fixture
def data(pair_directory, tmp_path) -> Path:
    """The pairs, beside a configuration for two hosts of one process each."""
    on_cpus(tmp_path, 2, 2)
    (tmp_path / "pairs").symlink_to(pair_directory)
    return tmp_path / "pairs"


def test_a_job_at_its_time_limit_saves_is_requeued_and_ends_like_an_undisturbed_run(
    data, tmp_path, cluster, undisturbed
):
    # SLURM counts in minutes; the signal comes one to two minutes after the start.
    times = {"--time=08:00:00": "--time=00:03:00", "B:TERM@120": "B:TERM@60"}
    script = job_script(data, str(tmp_path / "run"), **times)
    began = time.time()
    # Twelve steps take longer than that, however quick the machine is.
    job = cluster.submit(script, STEP_SECONDS="12", **NO_FAULT)
    cluster.wait(job, lambda shown: int(shown["Restarts"]) > 0, PATIENCE)
    SECONDS_TO_OUTCOME.append(("SLURM: time up, until queued again", time.time() - began))
    saved = (tmp_path / "run" / "checkpoints" / "LATEST").read_text()
    assert 0 < int(saved.removeprefix("step_")) < 12
    assert_trains_to_the_end(cluster, job)
    assert_ends_like(tmp_path / "run", undisturbed)


def test_a_preempted_job_saves_and_continues_after_the_other_has_ended(
    data, tmp_path, cluster, undisturbed
):
    run = tmp_path / "run"
    # With time to save before it is killed.
    script = job_script(data, str(run))
    job = cluster.submit(script, "--partition=graceful", STEP_SECONDS="1", **NO_FAULT)
    wait_for_step(run, 2)
    began = time.time()
    urgent = cluster.submit(
        "#!/bin/bash\nsleep 2\n", "--partition=urgent", "--nodes=2", "--exclusive"
    )
    cluster.wait(urgent, lambda shown: shown["JobState"] in ("RUNNING", "COMPLETED"), PATIENCE)
    outcome = "SLURM: preempted, until the other job runs"
    SECONDS_TO_OUTCOME.append((outcome, time.time() - began))
    assert_completes(cluster, urgent)
    assert_trains_to_the_end(cluster, job)
    assert int(cluster.show(job)["Restarts"]) == 1
    assert_ends_like(run, undisturbed)
    # The job continued its run instead of starting a new one.
    assert len(metrics_of(run)) == 14
