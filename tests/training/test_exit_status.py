"""The exit status of train.py, and what it prints when it fails."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import pytest
from runs import training

from pointup.cli import main as cli
from pointup.errors import ConfigError

PROGRAMS = {
    "train.py": training.main,
    "pointup train": lambda args: cli.main(["train", *args]),
}
RENAMED = ["--model.quota-trust", "0.3"]


@pytest.fixture(params=PROGRAMS)
def prog(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def program(prog: str) -> Callable[[list[str]], int]:
    return PROGRAMS[prog]


def test_an_error_names_the_program(
    prog: str, program: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert program(RENAMED) == 1
    assert capsys.readouterr().err.startswith(f"{prog}: error: --model.quota-trust is now")


def test_an_error_shows_its_origin_on_request(
    program: Callable[[list[str]], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POINTUP_TRACEBACK", "1")
    with pytest.raises(ConfigError, match="quota-trust is now"):
        program(RENAMED)


def test_the_help_of_a_reader_that_is_gone_ends_with_status_141(
    program: Callable[[list[str]], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w", buffering=1) as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert program(["--help"]) == 141
