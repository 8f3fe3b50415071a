"""Environments that a run works in: no stderr, the C locale, names of any letters, no terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from runs import options
from test_distributed import SMALL

from pointup.errors import ConfigError
from pointup.training.distributed.process_group import exit_status


@pytest.mark.slow
def test_a_run_succeeds_without_stderr_and_in_the_c_locale_in_a_directory_of_any_name(
    pair_directory, tmp_path
):
    run = tmp_path / "l\u00e4ufe \u7d75"
    words = [sys.executable, str(ROOT / "train.py"), "--data", str(pair_directory), *SMALL,
             "--output-dir", str(run), "--steps", "2", "--num-workers", "0"]  # fmt: skip
    ended = subprocess.run(
        ["sh", "-c", 'exec "$@" 2>&- </dev/null', "sh", *words],
        stdout=subprocess.PIPE,
        env={**os.environ, "LC_ALL": "C"},
    )
    log = (run / "logs" / "rank_0.log").read_text(encoding="utf-8")
    assert ended.returncode == 0, log
    assert "Traceback" not in log and "l\u00e4ufe" in log
    assert (run / "checkpoints" / "LATEST").read_text() == "step_2"
    with pytest.raises(ConfigError, match=r"--output-dir .* LC_ALL"):
        # The name as Python decodes it if it follows the locale strictly.
        options(pair_directory, Path(os.fsencode(run).decode("ascii", "surrogateescape")))


def test_a_program_of_training_has_streams_where_it_was_started_without(monkeypatch):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)

    def program() -> None:
        for stream in (sys.stdout, sys.stderr):
            assert not stream.isatty()
            stream.write("lost")

    assert exit_status(program, "train.py") == 0


def test_a_run_under_nohup_outlives_its_terminal():
    code = (
        "import os, signal, time\n"
        "from pointup.training.distributed.preemption import StopRequest\n"
        "with StopRequest() as stop:\n"
        "    os.kill(os.getpid(), signal.SIGHUP); time.sleep(0.3); print(stop.requested_by)\n"
    )
    requests = {}
    for handler in (signal.SIG_DFL, signal.SIG_IGN):
        ended = subprocess.run(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda handler=handler: signal.signal(signal.SIGHUP, handler),
        )
        requests[handler] = ended.stdout.strip()
    assert requests == {signal.SIG_DFL: "SIGHUP", signal.SIG_IGN: "None"}
