"""Metrics file, logs, console and tables of a run, also on a full disk."""

from __future__ import annotations

import io
import json
import logging
import sys
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from monitored import METRICS, ROWS, SCHEDULE, recording, totals

from pointup.training.progress import Progress
from pointup.training.run_directory.rank_log import LogFile, RankLog
from pointup.training.tracking.monitor import MetricsFile, TrainingBar
from pointup.training.tracking.tables import evaluation_table, plan_table, share_line


def test_truncated_lines_of_metrics_are_dropped_and_the_rest_is_kept(tmp_path):
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


def test_a_log_holds_messages_warnings_and_the_exception_that_ended_the_run(tmp_path, capsys):
    logger = logging.getLogger("pointup.somewhere")
    before = list(logging.getLogger().handlers)
    with pytest.raises(RuntimeError), RankLog(tmp_path):
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


def test_other_processes_are_silent_on_the_console(tmp_path, capsys):
    with RankLog(tmp_path, process_index=3, num_processes=4):
        logging.getLogger("pointup").warning("not on the console")
    assert capsys.readouterr().err == ""
    assert "not on the console" in (tmp_path / "logs" / "rank_3.log").read_text()


def test_progress_is_an_occasional_line_without_a_terminal(tmp_path, monkeypatch, capsys):
    clock = iter(np.arange(0, 1000, 0.5))
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    with RankLog(tmp_path):
        bar = TrainingBar(seconds_between_lines=30)
        for step in range(1, 121):
            bar.move(SCHEDULE, Progress(step=step), totals(0.25, num_tokens=1000), 1e-3)
        bar.close()
    said = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in said] == [
        "step 1/240", "step 61/240", "step 120/240",
    ]  # fmt: skip
    assert said[1] == "step 61/240, loss 0.25, lr 0.001, 2,000 tokens/s, 01:29 left"


def test_the_line_of_the_last_step_comes_before_its_evaluation_and_the_end_of_the_run(
    tmp_path, capsys
):
    with RankLog(tmp_path):
        bar = TrainingBar()
        for step in (1, 2):
            bar.move(SCHEDULE, Progress(step=step), totals(), 1e-3)
        bar.pause()
        logging.getLogger("pointup").info("The run is complete.")
        bar.close()
    said = [line.split(",")[0] for line in capsys.readouterr().err.splitlines()]
    assert said == ["step 1/240", "step 2/240", "The run is complete."]


def test_progress_beyond_the_expected_length_shows_the_length_that_follows_from_its_share(
    tmp_path, capsys
):
    with RankLog(tmp_path):
        bar = TrainingBar(seconds_between_lines=0)
        schedule: Any = SimpleNamespace(
            total_steps=4, share_done=lambda progress: 0.1 * progress.step
        )
        for step in (3, 5):
            bar.move(schedule, Progress(step=step), totals(), 1e-3)
        bar.close()
    said = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in said[:2]] == ["step 3/4", "step 5/10"]


def test_progress_is_a_bar_on_a_terminal_and_messages_go_above_it(tmp_path, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", terminal)
    with RankLog(tmp_path):
        bar = TrainingBar()
        assert bar.bar is not None
        bar.bar.mininterval = 0  # Else the second step comes too soon to be drawn.
        shares = iter((0.25, 1.0))
        schedule: Any = SimpleNamespace(total_steps=None, share_done=lambda _: next(shares))
        bar.move(schedule, Progress(step=1), totals(0.5), 1e-3)
        logging.getLogger("pointup").info("a message")
        bar.move(schedule, Progress(step=2), totals(0.4), 1e-3)
        bar.close()
    text = terminal.getvalue()
    assert "25% |" in text and "step 1, loss 0.5" in text
    assert "100% |" in text and "step 2, loss 0.4" in text
    assert "\ra message\n" in text.replace(" ", "").replace("amessage", "a message")
    assert "step 1, loss 0.5" in (tmp_path / "logs" / "rank_0.log").read_text()


def test_a_bar_on_80_columns_shows_speed_and_time_left(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", terminal)
    clock = iter(np.arange(0, 1000, 0.5))
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    bar = TrainingBar()
    assert bar.bar is not None
    bar.bar.dynamic_ncols = lambda _: (79, 40)  # What tqdm finds on 80 columns.
    for step in (1, 121):
        bar.move(SCHEDULE, Progress(step=step), totals(0.25, num_tokens=9000), 1.2e-4)
    bar.close()
    line = terminal.getvalue().rstrip().splitlines()[-1].split("\r")[-1]
    assert line.endswith("| step 121/240, loss 0.25, lr 0.00012, 18,000 tokens/s, 00:00 left")
    assert len(line) < 80


def test_an_evaluation_table_is_aligned_and_defines_its_metrics():
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
    assert text.count("midpoints (no network): the midpoint baseline") == 1
    assert "baseline" not in evaluation_table(ROWS, METRICS, conventions=False)


def test_the_mean_of_the_ratios_of_the_clouds_is_not_taken_for_the_ratio_of_the_means():
    line = share_line(1.036, 1.0)
    assert line == (
        "Chamfer, cloud by cloud: 103.6% of that of the midpoints on average; lower for 100% of "
        "the clouds."
    )
    assert len(line) <= 100
    explained = "model against midpoints: ratio of the means; cloud by cloud: mean of the ratios"
    assert explained in evaluation_table(ROWS, METRICS)


def test_a_plan_is_two_columns_of_at_most_a_hundred_characters():
    text = plan_table({"processes": 2, "token budget": "24,576", "data": "word " * 50})
    assert text.splitlines()[:2] == ["processes     2", "token budget  24,576"]
    assert all(len(line) <= 100 for line in text.splitlines())
    assert text.splitlines()[3].startswith(" " * 14 + "word")


FULL_DISK = Path("/dev/full")


@pytest.mark.skipif(not FULL_DISK.exists(), reason="a device of Linux")
def test_lines_that_a_full_disk_rejects_are_written_once_there_is_space(tmp_path, caplog):
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
    accelerator, tmp_path, capsys, monkeypatch
):
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with recording(accelerator, tmp_path) as recorded:
        monkeypatch.setattr(accelerator.trackers[0], "log", full)
        handler = next(h for h in logging.getLogger().handlers if isinstance(h, LogFile))
        stream = handler.setStream(FULL_DISK.open("w"))
        recorded.train(10)
        recorded.train(20)
        recorded.monitor.print("continues")
    assert stream is not None
    stream.close()
    message = capsys.readouterr().err
    assert message.count("rank_0.log: No space left on device") == 1
    assert message.count("tensorboard can't write (No space left on device): no more curves") == 1
    assert "continues" in message and "Traceback" not in message


def test_an_error_in_the_thread_of_tensorboard_is_reported_once_without_its_traceback(
    accelerator, tmp_path, capsys, monkeypatch
):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def report(failed: threading.ExceptHookArgs) -> None:
        print("Traceback of", type(failed.thread).__name__, file=sys.stderr)

    monkeypatch.setattr(threading, "excepthook", report)
    with recording(accelerator, tmp_path) as recorded:
        events = accelerator.trackers[0].writer.file_writer.event_writer
        monkeypatch.setattr(events._async_writer._worker._record_writer, "write", full)
        for step in (10, 20, 30):
            recorded.train(step)
            events._async_writer._worker.join(0.5)
        other = threading.Thread(target=full)
        other.start()
        other.join()
    assert threading.excepthook is report
    message = capsys.readouterr().err
    assert message.count("tensorboard can't write (No space left on device): no more curves") == 1
    assert message.count("Traceback") == message.count("Traceback of Thread") == 1
