from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

import pointup
from pointup.cli import main as cli
from pointup.errors import DataError
from pointup.terminal import PIPE_CLOSED
from pointup.training.config import TrainConfig, as_dict


@dataclass
class Failing:
    """A command that raises `error`."""

    error: BaseException

    def run(self) -> int:
        raise self.error


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    monkeypatch.setattr(cli, "parse", lambda args: Failing(error))


def test_help_lists_every_subcommand_with_a_sentence_on_one_line(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main([])
    assert end.value.code == 0
    text = capsys.readouterr().out
    for name in cli.COMMANDS:
        assert re.search(rf"• {name} .*\.[ │]*$", text, re.MULTILINE), name


def test_an_unknown_option_is_refused_with_a_suggestion(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["prepare", "thin", "a.las", "-o", "out", "--ratoi", "4"])
    assert end.value.code == 2
    assert "--ratio" in capsys.readouterr().err


def test_options_and_positional_files_reach_the_subcommand():
    command = cli.parse(["prepare", "thin", "a.las", "b.las", "--ratio", "3", "-o", "out"]).source
    assert command.inputs == (Path("a.las"), Path("b.las"))
    assert command.ratio == 3
    assert command.dataset.output == Path("out")
    assert not command.dataset.overwrite


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"pointup {pointup.__version__}\n"


@pytest.mark.parametrize("error", [DataError("x.laz: bad,\n  very bad"), ValueError("x.laz: bad")])
def test_an_error_is_one_line_and_status_1(error, monkeypatch, capsys):
    fail_with(monkeypatch, error)
    assert cli.main(["inspect", "x"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("pointup: error: x.laz: bad")
    assert captured.err.count("\n") == 1


def test_an_error_shows_its_origin_on_request(monkeypatch):
    fail_with(monkeypatch, DataError("bad"))
    monkeypatch.setenv("POINTUP_TRACEBACK", "1")
    with pytest.raises(DataError):
        cli.main(["inspect", "x"])


def test_a_bug_keeps_its_traceback(monkeypatch):
    fail_with(monkeypatch, TypeError("a fault"))
    with pytest.raises(TypeError):
        cli.main(["inspect", "x"])


def test_training_on_windows_names_wsl_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "platform", "win32")
    assert cli.main(["train", "--steps", "2"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "WSL 2" in line


def test_an_interrupt_is_status_130(monkeypatch, capsys):
    fail_with(monkeypatch, KeyboardInterrupt())
    assert cli.main(["inspect", "x"]) == 130
    assert capsys.readouterr().err.strip() == "pointup: interrupted"


def test_a_closed_pipe_is_no_error():
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


@contextmanager
def without_reader() -> Iterator[None]:
    """Stdout is a pipe that its reader has closed; each line is written at once."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w", buffering=1) as stdout, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        yield


@pytest.mark.parametrize(
    ("words", "files"),
    [
        ("inspect DATA --view v.html", ["v.html"]),
        ("evaluate pairs DATA --json e.json --markdown e.md --view v.html",
         ["e.json", "e.md", "v.html"]),
        ("report RUN -o r.html", ["r.html"]),
    ],
    ids=["inspect", "evaluate", "report"],
)  # fmt: skip
def test_without_a_reader_of_stdout_a_command_still_writes_its_files(
    words, files, pair_directory, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    # A run whose dataset is gone: that it has no samples is printed before the page is written.
    (tmp_path / "run").mkdir()
    options = as_dict(TrainConfig(data=(str(tmp_path / "gone"),)))
    (tmp_path / "run" / "config.json").write_text(json.dumps(options))
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    places = {"DATA": str(pair_directory), "RUN": str(tmp_path / "run")}
    with without_reader():
        assert cli.main([places.get(word, word) for word in words.split()]) == PIPE_CLOSED
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == sorted(files)


def test_without_a_reader_of_stdout_a_failed_command_still_fails(monkeypatch, capsys):
    @dataclass
    class Printing(Failing):
        def run(self) -> int:
            print("so far")
            return super().run()

    monkeypatch.setattr(cli, "parse", lambda args: Printing(DataError("x.laz: bad")))
    with without_reader():
        assert cli.main(["inspect", "x"]) == 1
    assert capsys.readouterr().err == "pointup: error: x.laz: bad\n"


@pytest.mark.parametrize("command", ["prepare", "evaluate"])
def test_commands_for_one_process_refuse_several(command, monkeypatch, capsys):
    words = {"prepare": ["default", "-o", "x"], "evaluate": ["shapes", "--meshes", "x"]}[command]
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main([command, *words]) == 1
    assert f"`pointup {command}` runs in one process" in capsys.readouterr().err
