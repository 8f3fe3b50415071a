"""GPU behaviour tested without a GPU: placement of values, waits for the device, launches."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernels' wrappers need triton")

FILES = sorted(Path(__file__).parents[1].glob("emulated_*.py"))


@pytest.mark.parametrize(
    "file", [file for file in FILES if file.stem != "emulated_device"], ids=lambda file: file.stem
)
def test_on_the_emulated_device(file: Path) -> None:
    """In a separate process: torch registers the emulated device as an accelerator."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", str(file)],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0 and re.search(r"\d+ passed", done.stdout), done.stdout + done.stderr
