"""Hosts with other code, packages, data or directories are reported before the first step."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, wavy_pair
from disturbed import timed
from hosts import Network
from test_hosts import has_stepped, launch, output, statuses
from test_hosts import network as network

from pointup.datasets.pair_writer import write_pairs

pytestmark = pytest.mark.slow


def test_other_code_on_a_host_is_reported_before_the_first_step(
    pair_directory: Path, tmp_path: Path, network: Network
) -> None:
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
    pair_directory: Path, tmp_path: Path, network: Network
) -> None:
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
    pair_directory: Path, tmp_path: Path, network: Network, there: str
) -> None:
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
    pair_directory: Path, tmp_path: Path, network: Network
) -> None:
    run, own = tmp_path / "shared" / "run", tmp_path / "own"
    run.parent.mkdir()
    own.mkdir()
    network.hosts[1].mount(own, run.parent)
    with timed("output directory that only one host sees"):
        launch(network, pair_directory, run)
        assert all(statuses(network)), output(network)
    assert f"{run}: host1 can't see what host0 writes there" in output(network)
    assert not has_stepped(run)
