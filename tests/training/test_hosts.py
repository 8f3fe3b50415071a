"""Several hosts train one model: the documented launch lines, on links that fail, hosts that die.

The hosts are namespaces of this machine; see hosts.py. Skipped where those can't be made.
"""

from __future__ import annotations

import re
import shlex
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, SECONDS_TO_OUTCOME, metrics_of, wavy_pair
from disturbed import (
    LENGTH,
    SMALL,
    arguments,
    assert_ends_like,
    ends,
    has_ended,
    timed,
    wait_for_step,
)
from hosts import Host, Network, made_hosts

from pointup.datasets.pair_writer import write_pairs

pytestmark = pytest.mark.slow

CONFIGURATION = ROOT / "accelerate_configs" / "2x8gpu.yaml"
FAULTY = ROOT / "tests" / "faulty.py"
PATIENCE = 900


@pytest.fixture
def network(tmp_path) -> Iterator[Network]:
    """Two hosts, which all tests use except the one with three hosts."""
    with made_hosts(2, tmp_path) as made:
        yield made


def on_cpus(directory: Path, num_hosts: int, num_processes: int) -> Path:
    """The included configuration of two machines, for CPUs and other numbers."""
    text = CONFIGURATION.read_text()
    for before, after in {
        "use_cpu: false": "use_cpu: true",
        "mixed_precision: bf16": 'mixed_precision: "no"',
        "num_machines: 2": f"num_machines: {num_hosts}",
        "num_processes: 16": f"num_processes: {num_processes}",
    }.items():
        assert before in text
        text = text.replace(before, after)
    (directory / "hosts.yaml").write_text(text)
    return directory / "hosts.yaml"


def launch(
    network: Network,
    data: Path,
    run: Path,
    *options: object,
    restarts: int = 0,
    only: Host | None = None,
    **environment: str,
) -> None:
    """Start a run with a process on every host, or only the launcher of one host."""
    count = len(network.hosts)
    configuration = on_cpus(network.hosts[0].outputs, count, count)
    for host in network.hosts if only is None else [only]:
        host.start(
            "accelerate", "launch", "--config_file", configuration, "--max_restarts", restarts,
            "--machine_rank", host.number, "--main_process_ip", network.hosts[0].address,
            FAULTY, *arguments(data, run, *options), "--num-workers", 0,
            **{"FAULT": "none none 0 none", **environment},
        )  # fmt: skip


def statuses(network: Network, seconds: float = PATIENCE) -> list[int]:
    """Exit statuses of the launchers, which must end within the time limit."""
    deadline = time.monotonic() + seconds
    return [host.started[-1].wait(max(0.1, deadline - time.monotonic())) for host in network.hosts]


def has_stepped(run: Path) -> bool:
    return (run / "metrics.jsonl").exists() and bool(metrics_of(run))


def output(network: Network) -> str:
    return "\n".join(f"--- host{host.number}\n{host.output}" for host in network.hosts)


def test_the_documented_launch_lines_train_the_model_that_one_host_trains(
    pair_directory, tmp_path, network
):
    run = tmp_path / "run"
    configuration = on_cpus(tmp_path, 2, 4)
    page = (ROOT / "docs" / "guides" / "clusters.md").read_text().replace("\\\n", " ")
    lines = re.findall(r"^accelerate launch .*--machine_rank.*main_process_ip.*", page, re.M)
    assert len(lines) == 2
    with timed("two hosts of two processes"):
        for host, line in zip(network.hosts, lines, strict=True):
            line = line.replace("$(pointup config 2x8gpu)", str(configuration))
            words = shlex.split(line.replace("--token-budget auto", ""), comments=True)
            words[words.index("pairs/")] = str(pair_directory)
            options = ["--output-dir", run, *SMALL, *LENGTH, "--num-workers", 0]
            host.start(*words, *options)
        assert statuses(network) == [0, 0], output(network)
    ends(pair_directory, tmp_path / "alone", "--accumulation-steps", 4, num_processes=1)
    assert_ends_like(run, tmp_path / "alone")
    assert all((run / "logs" / f"rank_{rank}.log").exists() for rank in range(4))


def test_hosts_whose_own_name_is_a_loopback_address_find_each_other(
    pair_directory, tmp_path, network, undisturbed
):
    # The installers of Debian and Ubuntu write such an /etc/hosts.
    for host in network.hosts:
        names = tmp_path / f"names_{host.number}"
        names.write_text(f"127.0.0.1 localhost\n127.0.1.1 host{host.number}\n")
        host.mount(names, Path("/etc/hosts"))
    launch(network, pair_directory, tmp_path / "run")
    assert statuses(network) == [0, 0], output(network)
    assert_ends_like(tmp_path / "run", undisturbed)


def test_a_slow_and_lossy_link_changes_only_the_time(
    pair_directory, tmp_path, network, undisturbed
):
    network.slow_down(delay=0.05, loss=0.01)
    with timed("link of 50 ms each way that loses 1 %"):
        launch(network, pair_directory, tmp_path / "run")
        assert statuses(network) == [0, 0], output(network)
    assert_ends_like(tmp_path / "run", undisturbed)


@pytest.mark.parametrize("seconds", [2, 15])
def test_a_temporarily_cut_link_only_delays_the_run(
    pair_directory, tmp_path, network, undisturbed, seconds
):
    run = tmp_path / "run"
    launch(network, pair_directory, run, STEP_SECONDS="0.3")
    wait_for_step(run, 3)
    network.cut(network.hosts[1])
    began = time.monotonic()
    time.sleep(seconds)
    step = len((run / "metrics.jsonl").read_text().splitlines())
    network.join(network.hosts[1])
    wait_for_step(run, step + 1)
    went_on = time.monotonic() - began
    SECONDS_TO_OUTCOME.append((f"link cut for {seconds} s, until the next step", went_on))
    assert statuses(network) == [0, 0], output(network)
    assert_ends_like(run, undisturbed)


def test_a_permanently_cut_link_ends_the_run_on_both_hosts_and_it_continues_when_fixed(
    pair_directory, tmp_path, network, undisturbed
):
    run = tmp_path / "run"
    launch(network, pair_directory, run, "--hang-timeout", 6, STEP_SECONDS="0.3")
    wait_for_step(run, 6)
    network.cut(network.hosts[1])
    cut = time.time()
    assert has_ended(cut, 60, run, "link cut for good, --hang-timeout 6"), output(network)
    assert all(statuses(network, 60)), output(network)
    for host, other in (network.hosts, reversed(network.hosts)):
        assert "train.py: error: the training hangs: " in host.output
        assert f"check host{other.number}, and the network" in host.output
    network.join(network.hosts[1])
    launch(network, pair_directory, run, "--hang-timeout", 6)
    assert statuses(network) == [0, 0], output(network)
    assert_ends_like(run, undisturbed)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("how", ["killed", "power lost"])
def test_a_host_that_dies_ends_the_run_and_a_restart_continues_it(
    pair_directory, tmp_path, network, undisturbed, number, how
):
    run, host = tmp_path / "run", network.hosts[number]
    launch(network, pair_directory, run, "--hang-timeout", 6, STEP_SECONDS="0.3")
    wait_for_step(run, 6)
    began = time.time()
    if how == "killed":
        host.kill_all()
    else:
        network.lose_power(host)
    assert has_ended(began, 60, run, f"host {number} {how}, --hang-timeout 6"), output(network)
    assert all(statuses(network, 60)), output(network)
    (other,) = set(network.hosts) - {host}
    if how == "power lost":
        assert f"check host{number}, and the network" in other.output
    network.join(host)
    launch(network, pair_directory, run, "--hang-timeout", 6)
    assert statuses(network) == [0, 0], output(network)
    assert_ends_like(run, undisturbed)


def test_a_killed_process_is_restarted_with_those_of_the_other_host(
    pair_directory, tmp_path, network, undisturbed
):
    run = tmp_path / "run"
    with timed("kill -9 of the process of host 1, --max_restarts 1"):
        launch(network, pair_directory, run, restarts=1, FAULT="kill forward 6 1")
        assert statuses(network) == [0, 0], output(network)
    assert_ends_like(run, undisturbed)


def test_a_restarted_host_joins_the_one_that_waits_for_it(
    pair_directory, tmp_path, network, undisturbed
):
    run, second = tmp_path / "run", network.hosts[1]
    launch(network, pair_directory, run, restarts=3, STEP_SECONDS="0.3")
    wait_for_step(run, 6)
    second.kill_all()
    with timed("host 1 killed and started again, --max_restarts 3 on both"):
        launch(network, pair_directory, run, restarts=3, only=second)
        assert statuses(network) == [0, 0], output(network)
    assert_ends_like(run, undisturbed)


# Hosts with other code, packages, data or directories are reported before the first step.


def test_other_code_on_a_host_is_reported_before_the_first_step(pair_directory, tmp_path, network):
    shutil.copytree(ROOT / "pointup", tmp_path / "pointup")
    with (tmp_path / "pointup" / "losses.py").open("a") as file:
        file.write("# One line more.\n")
    network.hosts[1].mount(tmp_path / "pointup", ROOT / "pointup")
    with timed("other code on host 1"):
        launch(network, pair_directory, tmp_path / "run")
        assert all(statuses(network)), output(network)
    assert "process 1 on host1 differs from process 0 in code: " in output(network)
    assert not has_stepped(tmp_path / "run")


def test_another_version_of_a_package_on_a_host_is_reported_before_the_first_step(
    pair_directory, tmp_path, network
):
    (tmp_path / "torch_geometric-9.8.7.dist-info").mkdir()
    (tmp_path / "torch_geometric-9.8.7.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch-geometric\nVersion: 9.8.7\n"
    )
    first, second = network.hosts
    with timed("another version of a package on host 1"):
        launch(network, pair_directory, tmp_path / "run", only=first)
        launch(network, pair_directory, tmp_path / "run", only=second, PYTHONPATH=str(tmp_path))
        assert all(statuses(network)), output(network)
    message = "process 1 on host1 differs from process 0 in packages: torch-geometric 9.8.7, there "
    assert message in output(network)
    assert not has_stepped(tmp_path / "run")


@pytest.mark.parametrize("there", ["other pairs", "no pairs"])
def test_other_or_missing_data_on_a_host_is_reported_before_the_first_step(
    pair_directory, tmp_path, network, there
):
    other = tmp_path / "other"
    if there == "other pairs":
        rng = np.random.default_rng(1)
        pairs = [wavy_pair(f"train_{i}", 40, 3.0, rng) for i in range(46)]
        write_pairs(pairs[:40], pairs[40:], other, info={})
    else:
        other.mkdir()
    network.hosts[1].mount(other, pair_directory)
    with timed(f"{there} on host 1"):
        launch(network, pair_directory, tmp_path / "run")
        assert all(statuses(network)), output(network)
    if there == "other pairs":
        assert "process 1 on host1 differs from process 0 in dataset" in output(network)
    else:
        assert str(pair_directory) in network.hosts[1].output
        assert "host1" in output(network)
    assert not has_stepped(tmp_path / "run")


def test_an_output_directory_that_only_one_host_sees_is_reported_before_the_first_step(
    pair_directory, tmp_path, network
):
    run, own = tmp_path / "shared" / "run", tmp_path / "own"
    run.parent.mkdir()
    own.mkdir()
    network.hosts[1].mount(own, run.parent)
    with timed("output directory that only one host sees"):
        launch(network, pair_directory, run)
        assert all(statuses(network)), output(network)
    assert f"{run}: host1 can't see what host0 writes there" in output(network)
    assert not has_stepped(run)
