"""GPU behaviour tested without a GPU: placement of values, waits for the device, launches."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernels' wrappers need triton")

TESTS = Path(__file__).parents[1]
FILES = [TESTS / "emulated_training.py", TESTS / "emulated_runs.py"]


@pytest.mark.parametrize(
    "selected", ["not slow", pytest.param("slow", marks=pytest.mark.slow)], ids=["core", "rest"]
)
def test_training_upsampling_and_whole_runs_on_the_emulated_device(selected: str) -> None:
    """In a separate process: torch registers the emulated device as an accelerator."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-m", selected, *FILES],
        capture_output=True,
        text=True,
        timeout=1800,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0 and re.search(r"\d+ passed", done.stdout), done.stdout + done.stderr
