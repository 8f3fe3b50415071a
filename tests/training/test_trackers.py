"""Trackers beside TensorBoard: one that fails ends neither the run nor the others."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.tracking import GeneralTracker
from pointup.training.tracking.tensorboard import REFERENCES, TAGS, validation_tag
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_monitor import METRICS, RESULT, train

from pointup.training.config import TrainConfig
from pointup.training.tracking.monitor import Monitor
from pointup.training.tracking.trackers import beside, wandb_id


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


@pytest.fixture
def make_accelerator(tmp_path: Path) -> Iterator[Any]:
    yield lambda *trackers: Accelerator(
        cpu=True, log_with=list(trackers), project_dir=str(tmp_path / "elsewhere")
    )
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def steps_in_tensorboard(path: Path) -> list[int]:
    events = EventAccumulator(str(path))
    events.Reload()
    return [point.step for point in events.Scalars(TAGS["loss"])]


def run(accelerator: Accelerator, path: Path) -> None:
    with Monitor(accelerator, TrainConfig(output_dir=path)) as monitor:
        for step in (1, 2, 3, 4):
            train(monitor, step)


@pytest.mark.parametrize("first", [True, False])
def test_a_tracker_that_does_not_start_is_left_out_and_tensorboard_goes_on(
    first: bool, make_accelerator: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder((0,), RuntimeError("no key"))
    names = [recorder, "tensorboard"] if first else ["tensorboard", recorder]
    run(make_accelerator(*names), tmp_path)
    assert steps_in_tensorboard(tmp_path) == [1, 2, 3, 4]
    assert recorder.logged == []
    message = capsys.readouterr().err
    assert message.count("no key") == 1


def test_a_connection_that_is_lost_costs_its_own_points_only(
    make_accelerator: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder((2, 3), ConnectionResetError(104, "Connection reset by peer"))
    run(make_accelerator(recorder, "tensorboard"), tmp_path)
    assert recorder.logged == [1, 4]
    assert steps_in_tensorboard(tmp_path) == [1, 2, 3, 4]
    message = capsys.readouterr().err
    assert message.count("can't write (Connection reset by peer): it is tried again") == 1


def test_names_of_curves_have_only_characters_that_mlflow_accepts(
    make_accelerator: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    config = TrainConfig(output_dir=tmp_path, log_with=())
    with Monitor(make_accelerator(recorder), config) as monitor:
        train(monitor, 1)
        monitor.validation(1, RESULT)
    names = {*recorder.names, *TAGS.values()}
    names |= {beside(validation_tag(metric), row) for metric in METRICS for row in REFERENCES}
    names.add(beside("a", 'pairs, "old" (50 %)/été'))
    assert len(names) > 20
    accepted = re.compile(r"^[/\w.\- :]*$")
    assert [name for name in names if not accepted.match(name)] == []


def test_a_continued_run_keeps_its_id_at_weights_and_biases(tmp_path: Path) -> None:
    first = wandb_id(tmp_path, resume_step=0)
    assert wandb_id(tmp_path, resume_step=30) == first
    assert wandb_id(tmp_path, resume_step=0) != first
