from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import pointup
from pointup.cli import main as cli
from pointup.errors import DataError


@dataclass
class Failing:
    """A command that raises `error`."""

    error: BaseException

    def run(self) -> int:
        raise self.error


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    monkeypatch.setattr(cli, "parse", lambda args: Failing(error))


def test_help_lists_every_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([])
    assert end.value.code == 0
    text = capsys.readouterr().out
    for name in cli.COMMANDS:
        assert f"• {name} " in text


def test_an_unknown_option_is_refused_with_a_suggestion(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["prepare", "thin", "a.las", "-o", "out", "--ratoi", "4"])
    assert end.value.code == 2
    assert "--ratio" in capsys.readouterr().err


def test_options_and_positional_files_reach_the_subcommand() -> None:
    command = cli.parse(["prepare", "thin", "a.las", "b.las", "--ratio", "3", "-o", "out"]).source
    assert command.inputs == (Path("a.las"), Path("b.las"))
    assert command.ratio == 3
    assert command.dataset.output == Path("out")
    assert not command.dataset.overwrite


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"pointup {pointup.__version__}\n"


@pytest.mark.parametrize("error", [DataError("x.laz: bad,\n  very bad"), ValueError("x.laz: bad")])
def test_an_error_is_one_line_and_status_1(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(monkeypatch, error)
    assert cli.main(["inspect", "x"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("pointup: error: x.laz: bad")
    assert captured.err.count("\n") == 1


def test_an_error_shows_its_origin_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, DataError("bad"))
    monkeypatch.setenv("POINTUP_TRACEBACK", "1")
    with pytest.raises(DataError):
        cli.main(["inspect", "x"])


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, TypeError("a fault"))
    with pytest.raises(TypeError):
        cli.main(["inspect", "x"])


def test_an_option_out_of_range_is_an_error_not_a_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["prepare", "thin", "a.las", "--ratio", "0.5", "-o", "out"]) == 1
    assert "--ratio 0.5" in capsys.readouterr().err


def test_an_interrupt_is_status_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(monkeypatch, KeyboardInterrupt())
    assert cli.main(["inspect", "x"]) == 130
    assert capsys.readouterr().err.strip() == "pointup: interrupted"


def test_a_closed_pipe_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "pointup.cli.main", "--help"],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    os.close(writing)
    assert done.returncode == 141
    assert done.stderr == ""
