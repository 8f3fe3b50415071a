"""Starts a SLURM cluster of two emulated hosts, with the installed slurmctld, slurmd and munged."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import ROOT
from hosts import Network, made_hosts

NEEDED = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol")
SECONDS_TO_START = 60
# One partition preempts the others; the GPUs are only names. A requeued job waits until the
# credential of its last start has expired.
CONFIGURATION = """
ClusterName=test
SlurmctldHost=host0
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={directory}/munge/socket,cred_expire=10
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool_%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd_%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=30
MinJobAge=3600
ReturnToService=2
GresTypes=gpu
NodeName=host[0-1] CPUs=4 Boards=1 SocketsPerBoard=1 CoresPerSocket=4 ThreadsPerCore=1 Gres=gpu:16
PartitionName=usual Nodes=ALL Default=YES PriorityTier=1 State=UP
PartitionName=graceful Nodes=ALL PriorityTier=1 GraceTime=60 State=UP
PartitionName=urgent Nodes=ALL PriorityTier=2 State=UP
"""


class Cluster:
    """Two hosts under SLURM; commands run on the first host."""

    def __init__(self, network: Network, directory: Path) -> None:
        self.network, self.directory = network, directory
        self.environment = {**os.environ, "SLURM_CONF": str(directory / "slurm.conf")}

    def run(self, *words: object, **environment: str) -> str:
        done = subprocess.run(
            self.network.hosts[0].words(*words), capture_output=True, text=True, cwd=ROOT,
            timeout=SECONDS_TO_START, env={**self.environment, **environment},
        )  # fmt: skip
        assert done.returncode == 0, f"{words}: {done.stdout} {done.stderr}"
        return done.stdout

    def submit(self, script: str, *options: object, **environment: str) -> int:
        """Submit a job; returns its number. Its output goes to slurm-NUMBER.txt."""
        path = self.directory / "job.sh"
        path.write_text(script)
        output = self.directory / "slurm-%j.txt"
        words = ("sbatch", "--parsable", f"--chdir={ROOT}", f"--output={output}", *options, path)
        return int(self.run(*words, **environment))

    def show(self, job: int | str) -> dict[str, str]:
        """The fields of `scontrol show job`."""
        text = self.run("scontrol", "--oneliner", "show", "job", job)
        return dict(re.findall(r"(\w+)=(\S*)", text))

    def output(self, job: int | str) -> str:
        path = self.directory / f"slurm-{job}.txt"
        return path.read_text() if path.exists() else ""

    def wait(self, job: int | str, is_so: Callable[[dict[str, str]], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not is_so(self.show(job)):
            assert time.monotonic() < deadline, f"{self.show(job)}\n{self.output(job)}"
            time.sleep(0.5)


@contextmanager
def made_cluster(directory: Path) -> Iterator[Cluster]:
    """Make a cluster; its daemons run on emulated hosts and end with them."""
    if missing := [name for name in NEEDED if shutil.which(name) is None]:
        pytest.skip(f"no {missing[0]}: install slurmctld, slurmd, slurm-client and munge")
    with made_hosts(2, directory) as network:
        cluster = Cluster(network, directory)
        settings = {"SLURM_CONF": str(directory / "slurm.conf")}
        (directory / "slurm.conf").write_text(CONFIGURATION.format(directory=directory))
        (directory / "gres.conf").write_text(f"Name=gpu File={directory}/gpu[0-15]\n")
        for i in range(16):
            (directory / f"gpu{i}").symlink_to("/dev/null")
        for name in ("state", "munge", "spool_host0", "spool_host1"):
            (directory / name).mkdir()
        key = directory / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        files = [
            f"--{name}-file={directory}/munge/{name}" for name in ("key", "pid", "log", "seed")
        ]
        first = network.hosts[0]
        first.start(
            "munged", "--foreground", "--force", f"--socket={directory}/munge/socket", *files
        )
        until((directory / "munge" / "socket").exists, first.output_file)
        first.start("slurmctld", "-D", **settings)
        for host in network.hosts:
            host.start("slurmd", "-D", "-N", f"host{host.number}", **settings)
        until(lambda: cluster_is_idle(cluster), first.output_file)
        yield cluster


def cluster_is_idle(cluster: Cluster) -> bool:
    words = ("sinfo", "--noheader", "--format=%T %D", "--partition=usual")
    info = subprocess.run(
        cluster.network.hosts[0].words(*words),
        capture_output=True, text=True, env=cluster.environment, timeout=SECONDS_TO_START,
    )  # fmt: skip
    return info.stdout.split() == ["idle", "2"]


def until(is_so: Callable[[], bool], output: Path) -> None:
    deadline = time.monotonic() + SECONDS_TO_START
    while not is_so():
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.2)
