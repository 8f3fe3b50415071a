"""The Processing script for QGIS: with a stand-in for QGIS, and in QGIS where it is installed."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import laspy
import numpy as np
import pytest
from conftest import ROOT

from pointup.cli.main import main

QGIS = next(filter(None, map(shutil.which, ("qgis_process.bin", "qgis_process"))), None)
"""Debian's `qgis_process` is a wrapper with an option that its program refuses."""
LINES = "print('a.laz: upsampling: 1,000 of 4,000 points, 00:35 left', flush=True);"


class Feedback:
    def __init__(self, cancels: bool = False) -> None:
        self.cancels, self.shown, self.messages = cancels, list[float](), list[str]()
        self.errors = list[str]()

    def isCanceled(self) -> bool:
        return self.cancels and bool(self.shown)

    def pushInfo(self, message: str) -> None:
        self.messages.append(message)

    def reportError(self, message: str) -> None:
        self.errors.append(message)

    def setProgress(self, percent: float) -> None:
        self.shown.append(percent)


@pytest.fixture
def script(monkeypatch, capsys) -> dict[str, Any]:
    class Stopped(Exception):
        pass

    core = MagicMock(QgsProcessingAlgorithm=object, QgsProcessingException=Stopped)
    monkeypatch.setitem(sys.modules, "qgis", MagicMock())
    monkeypatch.setitem(sys.modules, "qgis.core", core)
    assert main(["config", "qgis"]) == 0
    return runpy.run_path(capsys.readouterr().out.strip())


def algorithm_of(script: dict[str, Any]) -> Any:
    kinds = (kind for kind in script.values() if isinstance(kind, type))
    return next(kind for kind in kinds if hasattr(kind, "processAlgorithm"))


def test_progress_and_messages_reach_qgis_and_a_failure_is_told(script):
    feedback = Feedback()
    script["run"]([sys.executable, "-c", f"{LINES} print('done')"], feedback)
    assert feedback.shown == [25] and feedback.messages[-1] == "done"
    fails = [sys.executable, "-c", "import sys; sys.exit('a.laz: is empty')"]
    with pytest.raises(script["QgsProcessingException"], match=r"a\.laz: is empty"):
        script["run"](fails, feedback)
    with pytest.raises(script["QgsProcessingException"], match="Set Program to its path"):
        script["run"](["/no/pointup"], feedback)


@pytest.mark.parametrize(
    ("summary", "is_fatal"),
    [
        ("0 files written, 1 error: from 0 to 0 points, 0.1 s", True),
        ("1 file written, 1 error: from 300 to 600 points, 0.1 s", False),
        ("0 files written, 12 skipped, which were already written, 1 error, 0.1 s", False),
    ],
)
def test_files_are_loaded_although_another_one_failed(summary, is_fatal, script):
    program = [sys.executable, "-c", f"import sys; print('{summary}'); sys.exit('b.laz: is empty')"]
    if is_fatal:
        with pytest.raises(script["QgsProcessingException"], match=r"b\.laz: is empty"):
            script["run"](program, feedback := Feedback())
        return
    # What the program prints and its error come in any order.
    assert summary in script["run"](program, feedback := Feedback())
    assert len(feedback.errors) == 1


def test_a_wrong_input_leaves_no_folder(script, tmp_path):
    algorithm = algorithm_of(script)
    values = {"INPUT": "no.laz", "OUTPUT": str(tmp_path / "new"), "PROGRAM": sys.executable}
    given = MagicMock()
    given.parameterAsString = lambda _, name, __: values.get(name, "")
    with pytest.raises(script["QgsProcessingException"]):
        algorithm.processAlgorithm(given, {}, MagicMock(), Feedback())
    assert not (tmp_path / "new").exists()


def test_names_of_files_are_read_in_any_encoding_of_the_system(script, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "latin-1")
    feedback = Feedback()
    script["run"]([sys.executable, "-c", "print('größer.laz')"], feedback)
    assert feedback.messages == ["größer.laz"]


def test_cancel_ends_the_program(script, tmp_path):
    late = tmp_path / "late"
    program = f"import time; {LINES} time.sleep(30); open({str(late)!r}, 'w')"
    script["run"]([sys.executable, "-c", program], Feedback(cancels=True))
    assert not late.exists()


@pytest.mark.parametrize("readable", [(".vpc", ".laz"), (".laz",), ()])
def test_the_list_of_the_files_is_loaded_or_each_file_where_qgis_cannot_read_it(
    readable, script, tmp_path, monkeypatch
):
    # The folder has other files and an older list, which are not of this run.
    for name in ("old.vpc", "old.laz", "out.vpc", "a.laz", "sub/b.laz", "note.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    items = [{"assets": {"data": {"href": href}}} for href in ("./a.laz", "./sub/b.laz")]
    (tmp_path / "out.vpc").write_text(json.dumps({"features": items}), encoding="utf-8")
    messages = [
        f"in/a.laz: already written, skipped: {tmp_path / 'a.laz'}",
        f"{tmp_path / 'out.vpc'}: a virtual point cloud of 2 files",
    ]
    loaded = []

    def load(path: Path, *rest: object) -> bool:
        if path.suffix in readable:
            loaded.append(path.name)
        return path.suffix in readable

    algorithm = algorithm_of(script)
    monkeypatch.setitem(algorithm.processAlgorithm.__globals__, "run", lambda *_: messages)
    monkeypatch.setitem(algorithm.processAlgorithm.__globals__, "load", load)
    given = MagicMock()
    given.parameterAsString = lambda _, name, __: "" if name == "INPUT" else str(tmp_path)
    algorithm.processAlgorithm(given, {}, MagicMock(), Feedback())
    assert loaded == (["out.vpc"] if ".vpc" in readable else ["a.laz", "b.laz"] if readable else [])
    del messages[1], loaded[:]
    algorithm.processAlgorithm(given, {}, MagicMock(), Feedback())
    assert loaded == (["a.laz"] if ".laz" in readable else [])


@pytest.mark.parametrize("classes", ["2 5", "2,5", "2, 5"])
def test_classes_may_be_written_with_commas_and_blanks(classes, script, tmp_path, monkeypatch):
    commands: list[list[str]] = []
    algorithm = algorithm_of(script)
    names = algorithm.processAlgorithm.__globals__
    monkeypatch.setitem(names, "run", lambda command, _: commands.append(command) or [])
    values = {"INPUT": "a.laz", "OUTPUT": str(tmp_path), "PROGRAM": "pointup", "CLASSES": classes}
    given = MagicMock()
    given.parameterAsString = lambda _, name, __: values.get(name, "")
    algorithm.processAlgorithm(given, {}, MagicMock(), Feedback())
    assert commands[0][-2:] == ["--classes", "2,5"]
    values["FOLDER"] = "tiles"
    with pytest.raises(script["QgsProcessingException"], match="either a point cloud or a folder"):
        algorithm.processAlgorithm(given, {}, MagicMock(), Feedback())


@pytest.mark.slow
@pytest.mark.skipif(QGIS is None, reason="no QGIS: apt-get install qgis")
def test_qgis_upsamples_a_folder(tmp_path):
    assert QGIS is not None
    scripts = tmp_path / "profiles" / "default" / "processing" / "scripts"
    scripts.mkdir(parents=True)
    shutil.copy(ROOT / "pointup" / "cli" / "qgis_script.py", scripts / "upsample_points.py")
    program = tmp_path / "pointup"
    program.write_text(
        f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m pointup "$@"\n', encoding="utf-8"
    )
    program.chmod(0o755)
    (tmp_path / "tiles").mkdir()
    tile = laspy.LasData(laspy.LasHeader(point_format=6, version="1.4"))
    tile.xyz = np.random.default_rng(0).random((300, 3)) * [20, 20, 1]
    tile.write(tmp_path / "tiles" / "a.laz")
    inputs = {"FOLDER": tmp_path / "tiles", "RATIO": 2, "PROGRAM": program}
    words = [f"{name}={value}" for name, value in inputs.items()]
    own = {"QGIS_CUSTOM_CONFIG_PATH": str(tmp_path), "QT_QPA_PLATFORM": "offscreen"}
    own["PATH"] = os.defpath  # QGIS takes the first Python, not that of an active environment.
    ran = subprocess.run(
        [QGIS, "run", "script:upsample", "--", *words, f"OUTPUT={tmp_path / 'dense'}"],
        env=os.environ | own,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    with laspy.open(tmp_path / "dense" / "a.laz") as dense:
        assert dense.header.point_count == 600
