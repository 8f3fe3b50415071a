"""Monitor: output of a run on disk, in TensorBoard, in its logs and on the console."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from pointup.evaluation.cloud_metrics import Metric
from pointup.training.config import TrainConfig
from pointup.training.distributed.reduction import StepTotals
from pointup.training.evaluation import EvaluationResult, SampleClouds
from pointup.training.tracking.monitor import Monitor

ROWS = {
    "model": {"chamfer": 0.0123, "cd": 0.231, "p2f": 1.18},
    "midpoints": {"chamfer": 0.0131, "cd": 0.268, "p2f": 1.78},
    "source": {"chamfer": 0.0204, "cd": 0.5},
    "resampled": {"chamfer": 0.0101, "cd": 0.2185, "p2f": 0.0},
}
RESULT = EvaluationResult(ROWS, shares=[0.9, 1.1], pictures={}, is_complete=True)
METRICS = {
    "chamfer": Metric("Chamfer", "data unit", "mean distance there and back, not squared"),
    "cd": Metric(
        "CD", "x1e-3", "mean squared distance there and back, " + 10 * "each normalised, "
    ),
    "p2f": Metric("P2F", "x1e-3", ""),
}


@pytest.fixture
def accelerator(tmp_path: Path) -> Iterator[Accelerator]:
    yield Accelerator(cpu=True, log_with="tensorboard", project_dir=str(tmp_path / "elsewhere"))
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def train(monitor: Monitor, step: int, loss: float = 0.5) -> None:
    monitor.train(
        step,
        totals(loss),
        epoch=0,
        learning_rate=1e-3,
        grad_norm=1.0,
        step_seconds=0.5,
        fill=0.5,
    )


def totals(loss: float = 0.5) -> StepTotals:
    return StepTotals(
        num_clouds=16,
        num_tokens=4096,
        loss=loss,
        stop=False,
        elapsed_seconds=10.0,
        busy_seconds=(0.49, 0.48),
        data_wait_seconds=(0.0, 0.001),
        out_of_memory=0,
        data_seconds={"reading": 0.2, "packing": 0.1},
    )


def lines(config: TrainConfig) -> list[dict]:
    text = (config.output_dir / "metrics.jsonl").read_text()
    return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]


def events(config: TrainConfig) -> EventAccumulator:
    accumulator = EventAccumulator(str(config.output_dir), {"images": 0, "scalars": 0})
    return accumulator.Reload()


def test_a_logged_step_is_a_line_of_json_and_a_point_of_each_curve(
    accelerator: Accelerator, tmp_path: Path
) -> None:
    config = TrainConfig(output_dir=tmp_path)
    with Monitor(accelerator, config) as monitor:
        train(monitor, 10)
        assert lines(config)[0].keys() == {
            "step", "epoch", "loss", "learning_rate", "grad_norm", "num_clouds", "num_tokens",
            "tokens_per_second", "step_seconds", "data_wait_seconds", "idle_fraction",
            "peak_memory_bytes", "out_of_memory", "unreadable_clouds", "data_reading_seconds",
            "data_packing_seconds", "limited_by",
        }  # fmt: skip
        train(monitor, 20, loss=math.nan)
    assert [line["loss"] for line in lines(config)] == [0.5, None]
    recorded = events(config)
    assert [event.step for event in recorded.Scalars("1 overview/3 training loss")] == [10, 20]
    assert recorded.Scalars("1 overview/5 tokens per second")[0].value == 8192
    assert recorded.Scalars("4 speed/data packing seconds")[0].value == pytest.approx(0.1)
    assert recorded.Scalars("5 memory/peak in GiB")[0].value > 0
    assert lines(config)[0]["limited_by"] == "training"


def test_an_evaluation_is_a_line_and_curves_beside_its_references(
    accelerator: Accelerator, tmp_path: Path
) -> None:
    config = TrainConfig(output_dir=tmp_path)
    with Monitor(accelerator, config) as monitor:
        monitor.validation(50, RESULT)
    expected = {"step": 50, "share_of_midpoints": 1.0, "validation": ROWS, "is_complete": True}
    assert lines(config) == [expected]
    recorded = events(config)
    baselines = tmp_path / "baselines"
    for folder, value in (
        (tmp_path, 0.231),
        (baselines / "midpoint baseline", 0.268),
        (baselines / "resampled ground truth", 0.2185),
    ):
        # The same name in each run, so that TensorBoard draws them in one chart.
        (event,) = EventAccumulator(str(folder)).Reload().Scalars("2 validation/cd")
        assert (event.step, event.value) == (50, pytest.approx(value))
    (share,) = recorded.Scalars("1 overview/1 share of the midpoint baseline")
    assert share.value == 1.0


def test_the_first_evaluation_says_that_its_figures_are_those_of_the_network_alone(
    accelerator: Accelerator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Monitor(accelerator, TrainConfig(output_dir=tmp_path)) as monitor:
        for step, times in ((50, 1), (100, 0)):
            monitor.validation(step, RESULT)
            printed = " ".join(capsys.readouterr().err.split())
            assert printed.count("Figures of the network alone.") == times
            assert printed.count("`pointup evaluate pairs --as-written` measures") == times


@pytest.mark.parametrize(("unit", "shown"), [("US ft", "US ft"), ("", "data unit")])
def test_the_table_of_an_evaluation_names_the_unit_of_the_surveys(
    unit: str,
    shown: str,
    accelerator: Accelerator,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Monitor(accelerator, TrainConfig(output_dir=tmp_path)) as monitor:
        monitor.validation(50, replace(RESULT, unit=unit))
    assert capsys.readouterr().err.splitlines()[1].split() == [*shown.split(), "x1e-3", "x1e-3"]


def test_a_chart_holds_what_its_title_says_and_each_once(
    accelerator: Accelerator, tmp_path: Path
) -> None:
    from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

    with Monitor(accelerator, TrainConfig(output_dir=tmp_path)) as monitor:
        train(monitor, 10)
        monitor.validation(10, RESULT)
    recorded = events(TrainConfig(output_dir=tmp_path))
    (event,) = recorded.Tensors("custom_scalars__config__")
    layout = Layout.FromString(event.tensor_proto.string_val[0])
    tags = recorded.Tags()["scalars"]
    for category in layout.category:
        for chart in category.chart:
            found = [t for t in tags if any(re.search(p, t) for p in chart.multiline.tag)]
            assert [tag[len("1 overview/1 ") :] for tag in found] == [chart.title]
    assert [chart.title for chart in layout.category[0].chart] == [
        "share of the midpoint baseline", "validation Chamfer distance", "training loss",
        "learning rate", "tokens per second",
    ]  # fmt: skip


def test_clouds_of_the_first_sample_can_be_turned_about_and_the_source_is_stored_once(
    accelerator: Accelerator, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    source, target = rng.random((40, 3)), rng.random((90, 3))
    sample = SampleClouds(source, target, target + 0.01, target, vertical=True)
    with Monitor(accelerator, TrainConfig(output_dir=tmp_path)) as monitor:
        for step in (10, 20):
            clouds = {"bunny": sample, "another": sample}
            result = EvaluationResult(ROWS, [0.9], {}, is_complete=True, clouds=clouds)
            monitor.validation(step, result)
    recorded = EventAccumulator(str(tmp_path), {"tensors": 0}).Reload()
    steps = {
        tag: [event.step for event in recorded.Tensors(f"bunny/{tag}_VERTEX")]
        for tag in ("source", "prediction", "target")
    }
    assert steps == {"source": [10], "prediction": [10, 20], "target": [10]}
    # A browser can't draw those of all samples and runs.
    assert not any(tag.startswith("another") for tag in recorded.Tags()["tensors"])
    (event,) = recorded.Tensors("bunny/target_VERTEX")
    points = np.sort(np.array(event.tensor_proto.float_val).reshape(-1, 3), axis=0)
    # z of a survey is y of the plugin.
    expected = np.sort((target - target.mean(axis=0))[:, 2])
    np.testing.assert_allclose(points[:, 1], expected, atol=1e-6)


def test_texts_of_a_run_are_its_plan_command_versions_and_dataset(
    accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["/usr/bin/pointup", "train", "--steps", "3"])
    (tmp_path / "pairs").mkdir()
    (tmp_path / "pairs" / "pointup.json").write_text('{"tile": 10, "inputs": ["a.laz"]}')
    with Monitor(accelerator, TrainConfig(output_dir=tmp_path / "run")) as monitor:
        monitor.plan("device  cpu", [str(tmp_path / "pairs")])
    recorded = EventAccumulator(str(tmp_path / "run")).Reload()
    texts = {
        title: recorded.Tensors(f"{title}/text_summary")[0].tensor_proto.string_val[0].decode()
        for title in ("plan", "command", "versions", "dataset")
    }
    assert "device  cpu" in texts["plan"]
    assert "\npointup train \\\n    --steps 3" in texts["command"]
    assert f"| torch | {torch.__version__} |" in texts["versions"]
    assert "| inputs | ['a.laz'] |" in texts["dataset"]


def test_a_picture_arrives_in_tensorboard_as_it_was_drawn(
    accelerator: Accelerator, tmp_path: Path
) -> None:
    from matplotlib.image import imread

    config = TrainConfig(output_dir=tmp_path)
    picture = np.random.default_rng(0).integers(0, 256, (20, 30, 3)).astype(np.uint8)
    with Monitor(accelerator, config) as monitor:
        monitor.picture(7, "bunny", picture)
    (event,) = events(config).Images("pictures/bunny")
    read = imread(io.BytesIO(event.encoded_image_string), format="png")
    assert event.step == 7
    np.testing.assert_array_equal(np.round(read * 255).astype(np.uint8), picture)


def test_a_continued_run_has_no_step_twice(accelerator: Accelerator, tmp_path: Path) -> None:
    config = TrainConfig(output_dir=tmp_path)
    for resume_step, last_step, loss in ((0, 10, 1.0), (5, 8, 2.0), (8, 12, 3.0)):
        with Monitor(accelerator, config, resume_step) as monitor:
            for step in range(resume_step + 1, last_step + 1):
                train(monitor, step, loss)
                if step % 4 == 0:
                    monitor.validation(step, RESULT)
    expected = [1.0] * 5 + [2.0] * 3 + [3.0] * 4
    recorded = events(config)
    curve = recorded.Scalars("1 overview/3 training loss")
    assert [event.step for event in curve] == list(range(1, 13))
    assert [event.value for event in curve] == expected
    assert [
        event.step for event in recorded.Scalars("1 overview/2 validation Chamfer distance")
    ] == [
        4,
        8,
        12,
    ]
    steps = [line for line in lines(config) if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 13))
    assert [line["loss"] for line in steps] == expected
    assert [line["step"] for line in lines(config) if "validation" in line] == [4, 8, 12]


def test_hyperparameters_belong_to_the_run_and_add_no_other_run(
    accelerator: Accelerator, tmp_path: Path
) -> None:
    config = TrainConfig(output_dir=tmp_path, learning_rate=3e-3)
    for step in (0, 3):
        with Monitor(accelerator, config, step):
            pass
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"logs"}
    content = events(config).SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    hparams = HParamsPluginData.FromString(content).session_start_info.hparams
    assert hparams["learning_rate"].number_value == 3e-3 and "model.num_layers" in hparams
    assert hparams["augment"].WhichOneof("kind") == "bool_value"
    # What does not change the result is no hyperparameter.
    assert not {"num_workers", "output_dir", "debug"} & set(hparams)


def test_events_go_to_the_run_s_own_directory_one_run_after_the_other(
    accelerator: Accelerator, tmp_path: Path
) -> None:
    for name in ("first", "second"):
        config = TrainConfig(output_dir=tmp_path / name)
        with Monitor(accelerator, config) as monitor:
            train(monitor, 1)
        assert len(events(config).Scalars("1 overview/3 training loss")) == 1
    assert not (tmp_path / "elsewhere").exists()


def test_a_process_other_than_the_main_one_writes_only_its_log(tmp_path: Path) -> None:
    other = SimpleNamespace(
        is_main_process=False, process_index=1, num_processes=2, trackers=[],
        log_with=["tensorboard"],
    )  # fmt: skip
    with Monitor(other, TrainConfig(output_dir=tmp_path)) as monitor:
        train(monitor, 1)
        monitor.validation(1, RESULT)
        monitor.picture(1, "a", np.zeros((2, 2, 3), dtype=np.uint8))
        monitor.progress(1, 10, totals(), 0.1)
        monitor.print("for the main process")
    files = [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()]
    assert files == [Path("logs/rank_1.log")]
    assert "for the main process" not in (tmp_path / files[0]).read_text()
