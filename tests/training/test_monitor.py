"""Monitor: output of a run on disk, in TensorBoard, in its logs and on the console."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from accelerate import Accelerator
from monitored import RESULT, ROWS, new_accelerator, recording
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from tensorboard.summary.writer import event_file_writer

RANDOM = np.random.default_rng(0)
PICTURE = RANDOM.integers(0, 256, (20, 30, 3)).astype(np.uint8)
SHOWN = replace(RESULT, pictures={"bunny": PICTURE}, unit="US ft")


@pytest.fixture
def accelerator(tmp_path) -> Iterator[Accelerator]:
    with new_accelerator(tmp_path, "tensorboard") as made:
        yield made


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """The directory of a run with a plan, two steps and two evaluations."""
    folder = tmp_path_factory.mktemp("monitor")
    with pytest.MonkeyPatch.context() as patch, new_accelerator(folder, "tensorboard") as made:
        patch.setattr(
            "pointup.training.tracking.monitor.Monitor.plan_text", lambda *_: "device  cpu"
        )
        with recording(made, folder / "run") as recorded:
            recorded.monitor.plan(*[None] * 3)  # type: ignore[arg-type]
            recorded.train(10)
            recorded.evaluate(10, SHOWN)
            recorded.train(20, loss=math.nan)
            recorded.evaluate(20, SHOWN)
    assert not (folder / "elsewhere").exists()
    assert (folder / "run" / "plan.txt").read_text() == "device  cpu\n"
    return folder / "run"


def lines(run: Path) -> list[dict]:
    text = (run / "metrics.jsonl").read_text()
    return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]


def events(run: Path) -> EventAccumulator:
    return EventAccumulator(str(run), {"images": 0, "scalars": 0, "tensors": 0}).Reload()


def test_a_logged_step_is_a_line_of_json_and_a_point_of_each_curve(run):
    steps = [line for line in lines(run) if "loss" in line]
    assert steps[0].keys() == {
        "step", "epoch", "loss", "learning_rate", "grad_norm", "num_clouds", "num_tokens",
        "tokens_per_second", "step_seconds", "data_wait_seconds", "idle_fraction",
        "peak_memory_bytes", "out_of_memory", "unreadable_clouds", "data_reading_seconds",
        "data_packing_seconds", "limited_by",
    }  # fmt: skip
    assert [line["loss"] for line in steps] == [0.5, None]
    assert steps[0]["limited_by"] == "training"
    recorded = events(run)
    assert [event.step for event in recorded.Scalars("1 overview/3 training loss")] == [10, 20]
    for curve, value in (
        ("1 overview/5 tokens per second", 8192),
        ("4 speed/data packing seconds", 0.1),
        ("3 training/fill of the token budget", 0.5),
    ):
        assert recorded.Scalars(curve)[0].value == pytest.approx(value)
    assert recorded.Scalars("5 memory/peak in GiB")[0].value > 0


def test_an_evaluation_is_a_line_and_curves_beside_its_references(run):
    expected = {
        "step": 10, "share_of_midpoints": 1.0, "validation": ROWS, "is_complete": True,
        "is_kept": True,
    }  # fmt: skip
    assert next(line for line in lines(run) if "validation" in line) == expected
    baselines = run / "baselines"
    for folder, value in (
        (run, 0.231),
        (baselines / "midpoint baseline", 0.268),
        (baselines / "resampled ground truth", 0.2185),
    ):
        # The same name in each run, so that TensorBoard draws them in one chart.
        event = events(folder).Scalars("2 validation/cd")[0]
        assert (event.step, event.value) == (10, pytest.approx(value))
    for folder in (run, baselines / "midpoint baseline"):
        shares = events(folder).Scalars("1 overview/1 share of the midpoint baseline")
        assert [share.value for share in shares] == [1.0, 1.0]


def test_the_figures_of_surveys_have_curves_beside_their_references(accelerator, tmp_path):
    of_surveys = {"model": {"canopy_rmse": 2.0}, "midpoints": {"canopy_rmse": 3.0}}
    with recording(accelerator, tmp_path) as recorded:
        recorded.evaluate(10, replace(RESULT, of_surveys=of_surveys))
    for folder, value in ((tmp_path, 2.0), (tmp_path / "baselines" / "midpoint baseline", 3.0)):
        assert events(folder).Scalars("2 validation/canopy rmse")[0].value == value


def test_the_first_table_has_the_unit_of_the_surveys_and_says_what_its_figures_are(
    accelerator, tmp_path, capsys
):
    with recording(accelerator, tmp_path) as recorded:
        for step, unit, times in ((50, "US ft", 1), (100, "", 0)):
            recorded.evaluate(step, replace(RESULT, unit=unit))
            printed = capsys.readouterr().err
            shown = unit or "data unit"
            assert printed.splitlines()[1].split() == [*shown.split(), "x1e-3", "x1e-3"]
            words = " ".join(printed.split())
            assert words.count("The figures are those of the output of `pointup upsample`") == times


def test_a_picture_arrives_in_tensorboard_as_it_was_drawn(run):
    from matplotlib.image import imread

    event = events(run).Images("pictures/bunny")[0]
    read = imread(io.BytesIO(event.encoded_image_string), format="png")
    assert event.step == 10
    np.testing.assert_array_equal(np.round(read * 255).astype(np.uint8), PICTURE)


def test_a_continued_run_has_no_step_twice(accelerator, tmp_path, monkeypatch):
    # Files of the same second are read in the order of these numbers, as texts: 9 follows 10.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(100))
    for resume_step, last_step, loss in ((0, 10, 1.0), (5, 8, 2.0), (8, 12, 3.0)):
        with recording(accelerator, tmp_path, resume_step) as recorded:
            for step in range(resume_step + 1, last_step + 1):
                recorded.train(step, loss)
                if step % 4 == 0:
                    recorded.evaluate(step)
    expected = [1.0] * 5 + [2.0] * 3 + [3.0] * 4
    curve = events(tmp_path).Scalars("1 overview/3 training loss")
    assert [(event.step, event.value) for event in curve] == list(enumerate(expected, 1))
    evaluations = events(tmp_path).Scalars("1 overview/2 validation Chamfer distance")
    assert [event.step for event in evaluations] == [4, 8, 12]
    steps = [(line["step"], line["loss"]) for line in lines(tmp_path) if "loss" in line]
    assert steps == list(enumerate(expected, 1))
    assert [line["step"] for line in lines(tmp_path) if "validation" in line] == [4, 8, 12]


def test_hyperparameters_belong_to_the_run_and_add_no_other_run(accelerator, tmp_path):
    for step in (0, 3):
        with recording(accelerator, tmp_path, step, learning_rate=3e-3):
            pass
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"logs"}
    content = events(tmp_path).SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    hparams = HParamsPluginData.FromString(content).session_start_info.hparams
    assert hparams["learning_rate"].number_value == 3e-3 and "model.num_layers" in hparams
    assert hparams["augment"].WhichOneof("kind") == "bool_value"
    # What does not change the result is no hyperparameter.
    assert not {"num_workers", "output_dir", "debug"} & set(hparams)


def test_events_go_to_the_run_s_own_directory_one_run_after_the_other(accelerator, tmp_path):
    for name in ("first", "second"):
        with recording(accelerator, tmp_path / name) as recorded:
            recorded.train(1)
        assert len(events(tmp_path / name).Scalars("1 overview/3 training loss")) == 1


def test_a_process_other_than_the_main_one_writes_only_its_log(tmp_path):
    other = SimpleNamespace(
        is_main_process=False, process_index=1, num_processes=2, trackers=[],
        log_with=["tensorboard"],
    )  # fmt: skip
    with recording(other, tmp_path) as recorded:
        recorded.monitor.plan(*[None] * 3)  # type: ignore[arg-type]
        recorded.train(1)
        recorded.evaluate(1, SHOWN)
        recorded.monitor.print("for the main process")
    files = [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()]
    assert files == [Path("logs/rank_1.log")]
    assert "for the main process" not in (tmp_path / files[0]).read_text()
