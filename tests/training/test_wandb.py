"""`--log-with wandb` without a network: plan, clouds and best values beside the curves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from pointup.training.tracking.tensorboard import WandbRun

from pointup.training.config import TrainConfig
from pointup.training.evaluation import EvaluationResult, SampleClouds
from pointup.training.tracking.monitor import Monitor

pytest.importorskip("wandb", reason="no wandb: pip install wandb")


class RecordedRun:
    """Stands in for a run of wandb: keeps what it is given."""

    def __init__(self) -> None:
        self.best: dict[str, str] = {}
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.notes = ""

    def define_metric(self, name: str, summary: str) -> None:
        self.best[name] = summary

    def log(self, values: dict[str, Any], step: int) -> None:
        self.logged.append((step, values))


def sample(number: int = 200) -> SampleClouds:
    source, prediction, target = np.random.default_rng(0).random((3, number, 3)) + 1000
    return SampleClouds(source, source, prediction, target, vertical=True)


def test_clouds_are_centred_and_coloured_and_the_plan_is_the_note() -> None:
    run = RecordedRun()
    writer = WandbRun(run, ["share"])
    writer.write_plan("steps  60", "# Pairs")
    writer.write_clouds(7, "tile 3", sample(20_000))
    assert run.best == {"share": "min"}
    assert run.notes == "```\nsteps  60\n```\n\n# Pairs"
    ((step, found),) = run.logged
    assert step == 7
    assert found.keys() == {f"clouds/tile 3/{name}" for name in ("source", "prediction", "target")}
    for cloud in found.values():
        points = np.array(json.loads(Path(cloud._path).read_text()))
        assert points.shape == (10_000, 6)
        assert np.abs(points[:, :3]).max() < 1
        assert len(np.unique(points[:, 3:], axis=0)) > 100 and points[:, 3:].max() > 1


@pytest.mark.slow
def test_an_offline_run_keeps_curves_pictures_and_clouds_in_the_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    accelerator = Accelerator(cpu=True, log_with="wandb", project_dir=str(tmp_path))
    config = TrainConfig(output_dir=tmp_path / "run", log_with=("wandb",))
    rows = {"model": {"chamfer": 0.4}, "midpoints": {"chamfer": 0.5}}
    picture = np.zeros((40, 60, 3), np.uint8)
    result = EvaluationResult(
        rows, shares=[0.8], pictures={"tile 3": picture}, is_complete=True,
        clouds={"tile 3": sample()},
    )  # fmt: skip
    with Monitor(accelerator, config) as monitor:
        monitor.plan("steps  60", str(tmp_path))
        monitor.validation(5, result)
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    assert "wandb failed" not in caplog.text and "can't write" not in caplog.text
    media = tmp_path / "run" / "wandb"
    assert len(list(media.rglob("*.pts.json"))) == 3 and len(list(media.rglob("*.png"))) == 1
