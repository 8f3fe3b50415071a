"""Training on several datasets with weights: shares, figures by dataset, resuming in mid-epoch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from conftest import metrics_of, wavy_pair
from disturbed import latest_of
from forked import run_forked
from runs import final_weights, options, training
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_distributed import SMALL, steps_of

from pointup.cli.main import main
from pointup.datasets.held_out import rows_near
from pointup.datasets.pair_writer import write_pairs
from pointup.datasets.sampler import TokenBudgetBatchSampler
from pointup.errors import ConfigError
from pointup.training.config import TrainConfig, data_sources, parse_command_line
from pointup.training.datasets import open_training_data
from pointup.training.objective import LossConfig
from pointup.training.progress import Progress, RunSchedule
from pointup.training.tracking.monitor import Monitor


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> list[Path]:
    """Two datasets of 16 + 4 and 8 + 2 pairs, whose pairs have the same names."""
    folder, rng = tmp_path_factory.mktemp("two"), np.random.default_rng(1)

    def pairs(split: str, number: int) -> Iterator[Any]:
        for i in range(number):
            yield wavy_pair(f"{split}_{i}", int(rng.integers(20, 90)), 3.0, rng)

    for name, size in (("city", 8), ("forest", 4)):
        write_pairs(
            pairs("train", 2 * size), pairs("validation", size // 2), folder / name, info={}
        )
    return [folder / "city", folder / "forest"]


def arguments(two: list[Path], run: Path, steps: int, *more: object) -> list[str]:
    words = ("--data", two[0], "--data", f"{two[1]}=3", "--output-dir", run, *SMALL,
             "--num-workers", 0, "--steps", steps, "--eval-every", 12, *more)  # fmt: skip
    return [str(word) for word in words]


@pytest.mark.slow
def test_a_run_on_two_datasets_logs_each_and_continues_after_a_signal_to_one_of_two_processes(
    two, tmp_path, accelerator
):
    whole, run = tmp_path / "whole", tmp_path / "run"
    config = parse_command_line(arguments(two, whole, 12, "--accumulation-steps", 2), "")
    training.train(config, accelerator)
    lines = steps_of(whole)
    assert lines[-1]["epoch"] >= 1, "more than an epoch"
    # Until the end of the first epoch: 16 samples once, 8 samples three times.
    last = [line for line in lines if line["epoch"] == 0][-1]["datasets"]
    assert [last[name]["seen_clouds"] for name in ("city", "forest")] == [16, 24]
    for line in lines:
        losses, counts = zip(
            *((d["loss"] or 0.0, d["num_clouds"]) for d in line["datasets"].values()), strict=True
        )
        assert sum(counts) == line["num_clouds"]
        assert np.dot(losses, counts) == pytest.approx(line["loss"] * line["num_clouds"], rel=1e-6)

    words = arguments(two, run, 12, "--save-every", 3)
    ended = run_forked("faulty", *words, FAULT="terminate forward 4 1")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert latest_of(run) == "step_4"
    assert lines[4]["epoch"] == 0, "the run continues in mid-epoch"
    training.train(parse_command_line([*words, "--accumulation-steps", "2"], ""), accelerator)
    for expected, line in zip(lines, steps_of(run), strict=True):
        for name in ("num_clouds", "seen_clouds"):
            assert [d[name] for d in line["datasets"].values()] == [
                d[name] for d in expected["datasets"].values()
            ]
        for label, figures in line["datasets"].items():
            assert figures["loss"] == pytest.approx(expected["datasets"][label]["loss"], rel=1e-4)
    evaluations = [
        next(line for line in metrics_of(each) if "validation" in line) for each in (whole, run)
    ]
    both = evaluations[1]["datasets"]
    assert [both[name]["num_clouds"] for name in both] == [4, 2]
    chamfer = [both[name]["validation"]["model"]["chamfer"] for name in both]
    total = evaluations[1]["validation"]["model"]["chamfer"]
    assert np.dot(chamfer, [4, 2]) / 6 == pytest.approx(total)
    assert both["city"]["share_of_midpoints"] == pytest.approx(
        evaluations[0]["datasets"]["city"]["share_of_midpoints"], rel=1e-3
    )
    weights = final_weights(whole, 12)
    for name, weight in final_weights(run, 12).items():
        assert torch.equal(weight, weights[name]), name

    curves = EventAccumulator(str(run / "datasets" / "forest")).Reload()
    assert [e.step for e in curves.Scalars("3 training/clouds so far")] == list(range(1, 13))
    assert len(curves.Scalars("1 overview/2 validation Chamfer distance")) == 1
    log = (run / "logs" / "rank_0.log").read_text()
    assert "city" in log and "of the midpoint baseline's" in log


def test_other_weights_or_another_order_do_not_continue_a_run(two, tmp_path, accelerator):
    names = (str(two[0]), f"{two[1]}=3")
    config = options(two[0], tmp_path, steps=2, save_every=1, eval_every=2)
    training.train(replace(config, data=names), accelerator, stop_after=1)
    for changed in (names[::-1], (names[0], str(two[1]))):
        # The checkpoint is compared too, as config.json may have been edited.
        values = json.loads((tmp_path / "config.json").read_text()) | {"data": list(changed)}
        (tmp_path / "config.json").write_text(json.dumps(values))
        with pytest.raises(ConfigError, match="dataset"):
            training.train(replace(config, data=changed), accelerator)


def test_moved_datasets_continue_a_run_and_others_are_refused_and_not_recorded(
    two, tmp_path, accelerator
):
    first, second, moved = str(two[0]), str(two[1]), str(tmp_path / "moved")
    config = options(two[0], tmp_path / "run", steps=2, save_every=1, eval_every=2)
    training.train(replace(config, data=(first, second)), accelerator, stop_after=1)

    def recorded() -> list[str]:
        return json.loads((tmp_path / "run" / "config.json").read_text())["data"]

    shutil.copytree(second, moved)
    for other in ((moved, first), (second, first)):
        with pytest.raises(ConfigError, match=r"has changed .*the contents of the train pairs"):
            training.train(replace(config, data=other), accelerator)
        assert recorded() == [first, second]
    with pytest.raises(ConfigError, match=r"the run there has data .*, not"):
        training.train(replace(config, data=(first, f"{moved}=2")), accelerator)
    training.train(replace(config, data=(first, moved)), accelerator)
    assert recorded() == [first, moved]


def test_a_dataset_is_named_with_or_without_a_weight(two, tmp_path):
    (tmp_path / "lr=2").mkdir()
    named = data_sources([f"{two[0]}", f"{two[1]}=0.5", f"{tmp_path}/lr=2"])
    assert [(s.name, s.weight) for s in named[:2]] == [(str(two[0]), 1.0), (str(two[1]), 0.5)]
    assert (named[2].name, named[2].weight) == (f"{tmp_path}/lr=2", 1.0)
    assert data_sources([f"{tmp_path}/lr=2=3"])[0].weight == 3
    assert [s.label for s in data_sources(["x/pairs", "y/pairs"])] == ["x/pairs", "y/pairs"]


@pytest.mark.parametrize(
    "data, message",
    [
        (("a=0",), "greater than 0"),
        (("a=-1",), "greater than 0"),
        (("a=nan",), "greater than 0"),
        (("a=nan",), "a=nan: "),
        (("a=inf",), "a=inf: the weight must be greater than 0 and at most 10000"),
        (("a", "./a=2"), "given twice"),
    ],
)
def test_impossible_datasets_are_refused(data, message):
    with pytest.raises(ConfigError, match=message):
        TrainConfig(data=data)


def test_data_of_the_command_line_replaces_that_of_a_file(tmp_path):
    for given, words, data in (
        (["a", "b=2"], [], ("a", "b=2")),
        (["a", "b=2"], ["--data", "c"], ("c",)),
        (None, [], ()),
        ("a", ["--data=c", "--data=d"], ("c", "d")),
    ):
        (tmp_path / "run.json").write_text(json.dumps({"data": given}))
        words = ["--config", str(tmp_path / "run.json"), *words]
        assert parse_command_line(words, "").data == data


def test_a_dataset_without_validation_samples_is_for_training_only(two, tmp_path, accelerator):
    rng = np.random.default_rng(2)
    for name in ("third", "fourth"):
        pairs = [wavy_pair(f"{name}_{i}", 30, 3.0, rng) for i in range(20)]
        write_pairs(pairs, [], tmp_path / name, info={})
    third, fourth = tmp_path / "third", tmp_path / "fourth"
    data = open_training_data(TrainConfig(data=(str(two[0]), str(third))), accelerator)
    assert data.bounds == {"train": (0, 16, 36), "validation": (0, 4, 4)}
    drawn = open_training_data(TrainConfig(data=(str(third), str(fourth))), accelerator)
    assert drawn.bounds == {"train": (0, 18, 36), "validation": (0, 2, 4)}


def test_weights_for_normals_that_no_dataset_has_are_told(two, tmp_path, accelerator):
    loss = LossConfig(output_to_plane=2.0)
    pairs = [wavy_pair(f"p_{i}", 30, 3.0, np.random.default_rng(i)) for i in range(20)]
    for pair in pairs:
        pair.target_normals = None
    write_pairs(pairs, [], tmp_path / "bare", info={})
    for folders, weights, told in (
        ((tmp_path / "bare",), loss, True), ((tmp_path / "bare",), LossConfig(), False),
        ((tmp_path / "bare",), LossConfig(point_to_plane=0.0), False),
        ((two[0],), loss, False), ((two[0], tmp_path / "bare"), loss, False),
    ):  # fmt: skip
        config = TrainConfig(data=tuple(map(str, folders)), loss=weights, token_budget=1000)
        data = open_training_data(config, accelerator)
        monitor = Monitor(accelerator, config, data, Progress())
        schedule = RunSchedule(config, TokenBudgetBatchSampler([100] * 10, 1000))
        text = monitor.plan_text(schedule, num_weights=1000, checkpoint=None)
        assert ("no normals, so that --loss.point-to-plane" in text) == told


@pytest.mark.slow
def test_figures_of_an_evaluation_are_those_of_datasets_with_validation_samples(two, tmp_path):
    rng = np.random.default_rng(3)
    write_pairs([wavy_pair(f"w_{i}", 30, 3.0, rng) for i in range(8)], [], tmp_path / "w", info={})
    run = tmp_path / "run"
    words = ["--data", tmp_path / "w", "--data", two[0], "--output-dir", run, *SMALL]
    words += ["--num-workers", 0, "--steps", 4, "--eval-every", 4]
    assert main(["train", *map(str, words)]) == 0
    records = steps_of(run)
    assert set(records[-1]["datasets"]) == {"w", "city"}
    evaluations = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluated = [record["datasets"] for record in evaluations if "validation" in record]
    assert [set(figures) for figures in evaluated] == [{"city"}]


def test_training_samples_on_validation_ground_of_another_dataset_are_left_out(
    tmp_path, accelerator
):
    rng = np.random.default_rng(0)
    np.save(tmp_path / "survey.npy", rng.random((16_000, 3)) * [60, 60, 1])
    for name, tile in (("ten", 10), ("eight", 8)):
        words = ["prepare", "thin", tmp_path / "survey.npy", "--tile", tile, "--strip", 2]
        words += ["--min-points", 4, "--seed", tile, "--num-workers", 1, "-o", tmp_path / name]
        assert main([str(word) for word in words]) == 0
    folders = tuple(str(tmp_path / name) for name in ("ten", "eight"))
    data = open_training_data(TrainConfig(data=folders), accelerator)
    assert any("touching validation samples of" in line for line in data.left_out)
    train, validation = data.train.samples, data.validation.samples
    for one, other in ((0, 1), (1, 0)):
        assert len(train.parts[one])
        assert not len(rows_near(train.parts[one], validation.parts[other], 2.0))
    alone = open_training_data(TrainConfig(data=folders[:1]), accelerator)
    assert len(alone.train) > len(train.parts[0])


@pytest.mark.parametrize("kind", ["meshes", "h5"])
def test_training_samples_of_validation_shapes_of_another_dataset_are_left_out(
    kind, tmp_path, accelerator
):
    inputs, rng = tmp_path / "inputs", np.random.default_rng(0)
    inputs.mkdir()
    if kind == "meshes":
        for i in range(6):
            corners = f"0 0 0\n1 0 0\n0 1 0\n0 0 {i + 1}\n"
            faces = "3 0 2 1\n3 0 1 3\n3 0 3 2\n3 1 2 3\n"
            (inputs / f"mesh_{i}.off").write_text(f"OFF\n4 4 0\n{corners}{faces}")
    else:
        with h5py.File(inputs / "patches.h5", "w") as file:
            file["poisson_256"] = rng.random((24, 20, 3))
            file["poisson_1024"] = rng.random((24, 40, 3))
            file["name"] = np.repeat([b"a", b"b", b"c", b"d", b"e", b"f"], 4)
    options = ["--num-source", 40, "--ratio", 2] if kind == "meshes" else []
    for seed in (1, 2):
        words = ["prepare", kind, inputs, *options, "--validation", 0.4, "--seed", seed]
        assert main([str(word) for word in [*words, "-o", tmp_path / str(seed)]]) == 0
    folders = tuple(str(tmp_path / name) for name in ("1", "2"))

    def shapes(names: Any, number: int) -> list[str]:
        return [name.rpartition("/")[0] for name in names if name.startswith(f"{number}/")]

    data = open_training_data(TrainConfig(data=folders), accelerator)
    num_left_out = 0
    for folder, one, other in ((folders[0], 1, 2), (folders[1], 2, 1)):
        alone = open_training_data(TrainConfig(data=(folder,)), accelerator)
        before = [f"{other}/{name.rpartition('/')[0]}" for name in alone.train.names]
        held_out = set(shapes(data.validation.names, other))
        kept = [f"{one}/{shape[2:]}" for shape in before if shape not in held_out]
        assert 0 < len(kept) < len(before)
        assert shapes(data.train.names, one) == kept
        num_left_out += len(before) - len(kept)
    assert len(data.left_out) == num_left_out
    assert all("sharing a shape with validation samples of" in line for line in data.left_out)
