"""Progress of `pointup upsample`: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import io
import sys
import time

import numpy as np
import pytest

from pointup.progress import ProgressBar, heartbeat, tracked


def work(hidden: bool = False) -> None:
    with ProgressBar("survey.laz", hidden=hidden) as progress:
        progress.begin("reading")
        for _ in range(40):
            progress.add(1000)
        progress.begin("upsampling", 80_000)
        for _ in range(80):
            progress.add(1000)


@pytest.fixture
def clock(monkeypatch) -> None:
    """A clock by which each point takes a few milliseconds."""
    times = iter(np.arange(0, 10_000, 1.0))
    monkeypatch.setattr(ProgressBar, "written_at", 0.0)
    monkeypatch.setattr("pointup.progress.time.monotonic", lambda: next(times))


@pytest.mark.usefixtures("clock")
def test_a_log_has_a_line_every_half_minute(capsys):
    work()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "survey.laz: reading: 29,000 points"
    assert len(lines) == 4
    assert lines[-1] == "survey.laz: upsampling: 78,000 of 80,000 points, 00:02 left"


def test_quick_and_hidden_work_writes_nothing(capsys):
    work()
    work(hidden=True)
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("clock")
def test_hidden_work_writes_nothing_however_long_it_takes(capsys):
    work(hidden=True)
    assert capsys.readouterr().err == ""


def test_work_without_a_bar_writes_a_line_now_and_then(capsys, monkeypatch):
    monkeypatch.setattr("pointup.progress.SECONDS_BETWEEN_LINES", 0.05)
    monkeypatch.setattr("pointup.progress.SECONDS_BETWEEN_LOOKS", 0.01)
    with heartbeat("pointup evaluate"):
        time.sleep(0.3)
    lines = capsys.readouterr().err.splitlines()
    assert 2 <= len(lines) <= 6 and set(lines) == {"pointup evaluate: at work for 0 s"}
    time.sleep(0.1)
    assert capsys.readouterr().err == ""


def test_a_bar_says_how_much_is_done_before_and_after_its_first_item(capsys, monkeypatch):
    monkeypatch.setattr("pointup.progress.SECONDS_BETWEEN_LINES", 0.05)
    monkeypatch.setattr("pointup.progress.SECONDS_BETWEEN_LOOKS", 0.01)
    with heartbeat("pointup prepare"):
        for number in tracked(range(3), 3, "training scenes", "scenes"):
            time.sleep(0.15 * (number < 2))
        time.sleep(0.15)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "training scenes: 0 of 3 scenes, at work for 0 s"
    assert any(line.startswith("training scenes: 1 of 3 scenes, 00:00 left") for line in lines)
    assert lines[-1] == "pointup prepare: at work for 0 s"


@pytest.mark.usefixtures("clock")
def test_a_terminal_has_a_bar_and_no_lines(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", terminal)
    work()
    assert "survey.laz: upsampling" in terminal.getvalue()
    assert "left\n" not in terminal.getvalue()
