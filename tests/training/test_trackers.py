"""Trackers beside TensorBoard: failures of one, Weights & Biases without a network."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from accelerate.tracking import GeneralTracker
from monitored import METRICS, RESULT, new_accelerator, recording
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pointup.training.evaluation import EvaluationResult
from pointup.training.tracking.trackers import (
    REFERENCES,
    TAGS,
    beside,
    validation_tag,
    wandb_id,
)


class Recorder(GeneralTracker):
    """Keeps what it is given; raises `failure` at the steps in `fails_at`, and when started."""

    name = "recorder"
    requires_logging_directory = False

    def __init__(self, fails_at: tuple[int, ...] = (), failure: Exception | None = None) -> None:
        super().__init__()
        self.fails_at, self.failure = fails_at, failure
        self.logged: list[int] = []
        self.names: set[str] = set()

    @property
    def tracker(self) -> None:
        return None

    def start(self) -> None:
        if 0 in self.fails_at:
            assert self.failure is not None
            raise self.failure

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        pass

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        assert step is not None
        if step in self.fails_at:
            assert self.failure is not None
            raise self.failure
        self.logged.append(step)
        self.names |= values.keys()


def record_four_steps(path: Path, *trackers: Any) -> list[int]:
    """Record steps 1 to 4; returns those in TensorBoard."""
    with new_accelerator(path, *trackers) as made, recording(made, path) as recorded:
        for step in (1, 2, 3, 4):
            recorded.train(step)
    return [p.step for p in EventAccumulator(str(path)).Reload().Scalars(TAGS["loss"])]


@pytest.mark.parametrize("first", [True, False])
def test_a_tracker_that_does_not_start_is_left_out_and_tensorboard_goes_on(first, tmp_path, capsys):
    recorder = Recorder((0,), RuntimeError("no key"))
    names = [recorder, "tensorboard"] if first else ["tensorboard", recorder]
    assert record_four_steps(tmp_path, *names) == [1, 2, 3, 4]
    assert recorder.logged == []
    assert capsys.readouterr().err.count("no key") == 1


def test_a_connection_that_is_lost_costs_its_own_points_only(tmp_path, capsys):
    recorder = Recorder((2, 3), ConnectionResetError(104, "Connection reset by peer"))
    assert record_four_steps(tmp_path, recorder, "tensorboard") == [1, 2, 3, 4]
    assert recorder.logged == [1, 4]
    message = capsys.readouterr().err
    assert message.count("can't write (Connection reset by peer): it is tried again") == 1


def test_names_of_curves_have_only_characters_that_mlflow_accepts(tmp_path):
    recorder = Recorder()
    with (
        new_accelerator(tmp_path, recorder) as made,
        recording(made, tmp_path, log_with=()) as recorded,
    ):
        recorded.train(1)
        recorded.evaluate(1)
    names = {*recorder.names, *TAGS.values()}
    names |= {beside(validation_tag(metric), row) for metric in METRICS for row in REFERENCES}
    names.add(beside("a", 'pairs, "old" (50 %)/été'))
    assert len(names) > 20
    accepted = re.compile(r"^[/\w.\- :]*$")
    assert [name for name in names if not accepted.match(name)] == []


def test_a_continued_run_keeps_its_id_at_weights_and_biases(tmp_path):
    first = wandb_id(tmp_path, resume_step=0)
    assert wandb_id(tmp_path, resume_step=30) == first
    assert wandb_id(tmp_path, resume_step=0) != first


@pytest.mark.slow
def test_an_offline_run_of_wandb_keeps_pictures_in_the_run_directory(tmp_path, monkeypatch, caplog):
    pytest.importorskip("wandb", reason="no wandb: pip install wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    result = EvaluationResult(
        RESULT.rows, shares=[0.8], pictures={"tile 3": np.zeros((40, 60, 3), np.uint8)},
        is_complete=True,
    )  # fmt: skip
    with (
        new_accelerator(tmp_path, "wandb") as made,
        recording(made, tmp_path / "run", log_with=("wandb",)) as recorded,
    ):
        recorded.evaluate(5, result)
    assert "wandb failed" not in caplog.text and "can't write" not in caplog.text
    assert len(list((tmp_path / "run" / "wandb").rglob("*.png"))) == 1
