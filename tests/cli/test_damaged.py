"""Readers and commands, with damaged copies of small valid files: read, or refused in one line.

Each process has a limit of memory and every case one of time, see damaged.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from damaged import COMMANDS, FORMATS, NEEDED


def fuzz(directory: Path, num_cases: int, *formats: str) -> dict[str, dict[str, object]]:
    script = Path(__file__).parents[1] / "damaged.py"
    done = subprocess.run(
        [sys.executable, script, directory, str(num_cases), *formats],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report: dict[str, dict[str, object]] = json.loads(done.stdout)
    for name, count in report.items():
        assert count["else"] == [], name
        assert 5 <= count["cases"] == count["read"] + count["refused"]  # type: ignore[operator]
    return report


def test_damaged_files_of_every_format_are_read_or_refused(tmp_path):
    # The imports for commands and for reading pairs take longer than all other imports together.
    formats = FORMATS.keys() - COMMANDS.keys() - {"pairs"}
    report = fuzz(tmp_path, 25, *sorted(formats))
    assert report.keys() >= formats - NEEDED.keys()
    # Both must happen; otherwise the damages are too small or too large.
    assert sum(count["read"] for count in report.values()) > 50  # type: ignore[misc]
    assert sum(count["refused"] for count in report.values()) > 200  # type: ignore[misc]


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_hundreds_of_damaged_files_are_read_or_refused(name, tmp_path):
    report = fuzz(tmp_path, 1000, name)
    if name not in report:
        pytest.skip(f"{NEEDED[name]} is not installed")


def test_what_is_neither_read_nor_refused_is_noticed(tmp_path):
    from damaged import outcome

    def raises(error: Exception) -> str:
        def read(path: Path) -> None:
            raise error

        return outcome(read, tmp_path / "a.las", tmp_path)

    assert outcome(lambda path: None, tmp_path / "a.las", tmp_path) == "read"
    assert raises(ValueError(f"{tmp_path}/a.las: is empty")) == "refused"
    assert raises(KeyError("x")).startswith("KeyError")
    assert raises(ValueError("one line that names no file")).startswith("a bad message")
    assert raises(ValueError(f"{tmp_path}:\ntwo lines")).startswith("a bad message")
    caused = ValueError(f"{tmp_path}: not readable")
    caused.__cause__ = MemoryError()
    assert raises(caused).startswith("all the memory")
