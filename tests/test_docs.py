"""Scripts that the README shows: at least their syntax is right."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT

README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def test_shell_commands_parse() -> None:
    found = blocks("bash")
    assert any("#SBATCH" in block for block in found)
    for block in found:
        checked = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True)
        assert checked.returncode == 0 and not checked.stderr, checked.stderr


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not there")
def test_the_systemd_unit_is_valid(tmp_path: Path) -> None:
    (unit,) = blocks("ini")
    path = tmp_path / "pointup.service"
    path.write_text(unit.replace("%h/venv/bin/accelerate", "/bin/true"))
    checked = subprocess.run(
        ["systemd-analyze", "--user", "verify", str(path)],
        capture_output=True,
        text=True,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
    )
    assert checked.returncode == 0 and not checked.stderr, checked.stderr


@pytest.mark.parametrize("name", re.findall(r"\]\(([^)#]+)\)", README))
def test_what_the_readme_links_to_is_there(name: str) -> None:
    assert name.startswith("https://") or (ROOT / name).exists()
