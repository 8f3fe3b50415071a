"""Monitor: output of a run on disk, in TensorBoard, in its logs and on the console."""

from __future__ import annotations

import io
import json
import logging
import math
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from pointup.errors import ConfigError
from pointup.evaluation.cloud_metrics import Metric
from pointup.training.config import TrainConfig
from pointup.training.distributed.reduction import StepTotals
from pointup.training.evaluation import EvaluationResult, SampleClouds
from pointup.training.run_directory.metrics_file import MetricsFile
from pointup.training.run_directory.rank_log import RankLog
from pointup.training.tracking.monitor import Monitor
from pointup.training.tracking.progress_bar import ProgressBar
from pointup.training.tracking.tables import evaluation_table, plan_table

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
    assert lines(config) == [{"step": 50, "share_of_midpoints": 1.0, "validation": ROWS}]
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
        monitor.plan("device  cpu", str(tmp_path / "pairs"))
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


def test_a_tracker_that_is_not_installed_is_an_error(
    accelerator: Accelerator, tmp_path: Path
) -> None:
    config = TrainConfig(output_dir=tmp_path, log_with=("tensorboard", "swanlab"))
    with pytest.raises(ConfigError, match=r"swanlab.*not installed"):
        Monitor(accelerator, config)


def test_truncated_lines_of_metrics_are_dropped_and_the_rest_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "lo')
    file = MetricsFile(path, resume_step=2)
    file.write({"step": 3, "loss": torch.tensor(float("inf")), "n": np.int64(4)})
    # Another program sees the line before the run ends.
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    file.close()
    assert kept == [{"step": 1}, {"step": 2}, {"step": 3, "loss": None, "n": 4}]
    MetricsFile(path).close()
    assert path.read_text() == ""


def test_a_log_holds_messages_warnings_and_the_exception_that_ended_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("pointup.somewhere")
    before = list(logging.getLogger().handlers)
    with pytest.raises(RuntimeError), RankLog(tmp_path), RankLog(tmp_path):
        logger.debug("in detail")
        logger.info("for all to see")
        logger.warning("a step was skipped")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            message = "old-fashioned"
            warnings.warn(message, UserWarning, stacklevel=1)
        raise RuntimeError("out of luck")
    text = (tmp_path / "logs" / "rank_0.log").read_text()
    for part in ("in detail", "for all to see", "old-fashioned", "Traceback", "out of luck"):
        assert part in text
    assert text.count("in detail") == 1
    console = capsys.readouterr().err
    assert "for all to see\nwarning: a step was skipped\n" in console
    assert "ERROR pointup: process 0 ends: out of luck" in text
    assert console.count("\n") == 3
    assert "in detail" not in console and "Traceback" not in console
    assert logging.getLogger().handlers == before


def test_other_processes_are_silent_on_the_console(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RankLog(tmp_path, process_index=3, num_processes=4):
        logging.getLogger("pointup").warning("not on the console")
    assert capsys.readouterr().err == ""
    assert "not on the console" in (tmp_path / "logs" / "rank_3.log").read_text()


def test_progress_is_an_occasional_line_without_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter(np.arange(0, 1000, 0.5))
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    with RankLog(tmp_path):
        bar = ProgressBar(seconds_between_lines=30)
        for step in range(1, 121):
            bar.move(step, 240, step / 240, 0.25, 1e-3, 1000)
        bar.close()
    said = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in said] == [
        "step 1/240", "step 61/240", "step 120/240",
    ]  # fmt: skip
    assert said[1] == "step 61/240, loss 0.25, lr 0.001, 2,000 tokens/s, 01:29 left"


def test_progress_is_a_bar_on_a_terminal_and_messages_go_above_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", terminal)
    with RankLog(tmp_path):
        bar = ProgressBar()
        bar.move(1, None, 0.25, 0.5, math.nan, 1000)
        logging.getLogger("pointup").info("a message")
        bar.move(2, None, 1.0, 0.4, math.nan, 1000)
        bar.close()
    text = terminal.getvalue()
    assert "25% |" in text and "step 1, loss 0.5" in text
    assert "100% |" in text and "step 2, loss 0.4" in text
    assert "\ra message\n" in text.replace(" ", "").replace("amessage", "a message")
    assert "step 1, loss 0.5" in (tmp_path / "logs" / "rank_0.log").read_text()


def test_an_evaluation_table_is_aligned_and_defines_its_metrics() -> None:
    text = evaluation_table(ROWS, METRICS, title="step 50")
    table = text.splitlines()
    assert max(map(len, table)) <= 100
    assert table[0].split() == ["step", "50", "Chamfer", "CD", "P2F"]
    assert table[1].split() == ["data", "unit", "x1e-3", "x1e-3"]
    assert len({len(line) for line in table[:7] if line}) == 1
    by_name = {line[: len("resampled ground truth")].strip(): line.split() for line in table[2:7]}
    assert by_name["source as it is"][-1] == "-"
    assert by_name["resampled ground truth"][-3:] == ["0.0101", "0.2185", "0"]
    assert by_name["model against midpoints"[:22].strip()][-3:] == ["-6.1%", "-13.8%", "-33.7%"]
    assert "Chamfer: mean distance" in text
    assert "Chamfer: mean distance" not in evaluation_table(ROWS, METRICS, conventions=False)
    assert evaluation_table({"model": {"own": 1.0}}).splitlines()[0].split() == ["own"]


def test_a_plan_is_two_columns_of_at_most_a_hundred_characters() -> None:
    text = plan_table({"processes": 2, "token budget": "24,576", "data": "word " * 50})
    assert text.splitlines()[:2] == ["processes     2", "token budget  24,576"]
    assert all(len(line) <= 100 for line in text.splitlines())
    assert text.splitlines()[3].startswith(" " * 14 + "word")


FULL_DISK = Path("/dev/full")


@pytest.mark.skipif(not FULL_DISK.exists(), reason="a device of Linux")
def test_lines_that_a_full_disk_rejects_are_written_once_there_is_space(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.write({"step": 1})
    real, metrics.file = metrics.file, FULL_DISK.open("ab", buffering=0)
    for step in (2, 3):
        metrics.write({"step": step})
    metrics.file.close()
    metrics.file = real
    metrics.write({"step": 4})
    metrics.close()
    steps = [json.loads(line)["step"] for line in metrics.path.read_text().splitlines()]
    assert steps == [1, 2, 3, 4]
    assert caplog.text.count("metrics.jsonl: can't be written (No space left on device)") == 1


@pytest.mark.skipif(not FULL_DISK.exists(), reason="a device of Linux")
def test_a_full_disk_under_logs_and_trackers_is_reported_once_and_ends_nothing(
    accelerator: Accelerator,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with Monitor(accelerator, TrainConfig(output_dir=tmp_path)) as monitor:
        monkeypatch.setattr(accelerator, "log", full)
        stream = monitor.log.handlers[0].setStream(FULL_DISK.open("w"))  # type: ignore[attr-defined]
        train(monitor, 10)
        train(monitor, 20)
        monitor.print("continues")
    stream.close()
    message = capsys.readouterr().err
    assert message.count("rank_0.log: No space left on device") == 1
    assert message.count("trackers can't write (No space left on device)") == 1
    assert "continues" in message and "Traceback" not in message
