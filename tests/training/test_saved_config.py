"""config.json of a run: which values count as the same, and what a start without a run leaves."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from accelerate import Accelerator

from pointup.errors import ConfigError
from pointup.model.config import ModelConfig
from pointup.training.config import TrainConfig, as_dict
from pointup.training.saved_config import check_same_run, claim_output_dir


def check(before: tuple[str, ...], now: tuple[str, ...]) -> None:
    saved, given = (as_dict(TrainConfig(data=data)) for data in (before, now))
    check_same_run(saved, given, Path("config.json"))


def test_the_same_datasets_written_differently_continue_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        Path(name).mkdir()
    for same in ("a/", "./a", "b/../a", str(tmp_path / "a"), "a=1"):
        check(("a", "b=2"), (same, "b/=2.0"))


@pytest.mark.parametrize("other", [("a",), ("b=2", "a"), ("a", "b"), ("a=2", "b=2"), ("a", "c=2")])
def test_other_datasets_weights_or_orders_are_another_run(other: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"has data \['a', 'b=2'\], not"):
        check(("a", "b=2"), other)


def test_a_run_that_started_from_lidar_before_models_had_heights_goes_on() -> None:
    now = as_dict(TrainConfig(initial_model="lidar", model=ModelConfig(heights=True)))
    saved = as_dict(TrainConfig(initial_model="lidar"))
    del saved["model"]["heights"]
    check_same_run(saved, now, Path("config.json"))


@pytest.mark.parametrize(
    ("content", "warning"),
    [
        (None, "config.json of a start without a checkpoint (data was ['nowhere']) is replaced"),
        ("[]", "config.json: holds no options of a run (it holds []); it is replaced"),
    ],
    ids=["another dataset", "no options"],
)
def test_what_a_start_without_a_checkpoint_left_is_replaced_with_a_warning(
    content: str | None,
    warning: str,
    tmp_path: Path,
    accelerator: Accelerator,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / "config.json"
    path.write_text(content or json.dumps(as_dict(TrainConfig(data=("nowhere",)))))
    with caplog.at_level(logging.WARNING, "pointup"):
        claim_output_dir(TrainConfig(data=("here",), output_dir=tmp_path), accelerator)
    (message,) = caplog.messages
    assert message == f"{tmp_path}/{warning}"
    assert json.loads(path.read_text())["data"] == ["here"]
