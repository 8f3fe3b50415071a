"""The README and the documentation: links, names, commands and examples are right."""

from __future__ import annotations

import ast
import importlib
import io
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import tyro
from conftest import ROOT

from pointup.cli.main import COMMANDS, parse
from pointup.training.config import TrainConfig

README = ROOT / "README.md"
CLUSTERS = ROOT / "docs" / "guides" / "clusters.md"
PAGES = sorted(
    [
        README,
        ROOT / "CONTRIBUTING.md",
        ROOT / "CHANGELOG.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "pointup" / "weights").rglob("*.md"),
    ]
)
HISTORY = {ROOT / "CHANGELOG.md", ROOT / "docs" / "experiments.md"}
"""Pages that may name files and options of the past."""
# Written from other text when the site is built, see docs/site_pages.py.
GENERATED = {"changelog.md", "contributing.md", "models/lidar.md", "models/shapes.md"}
ON_GPUS = ("1gpu", "8gpu", "2x8gpu")

of_every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
of_current_pages = pytest.mark.parametrize(
    "page", [p for p in PAGES if p not in HISTORY], ids=lambda page: str(page.relative_to(ROOT))
)


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def command_lines(page: Path) -> Iterator[str]:
    """The commands in the bash blocks of a page, one a line, without comments."""
    for block in blocks(page, "bash"):
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            yield from re.split(r"\s+&&\s+", re.sub(r"\s+#.*", "", line))


def words_of_pointup(page: Path) -> Iterator[list[str]]:
    """What follows `pointup` in each command of a page; train.py counts as `pointup train`."""
    for line in command_lines(page):
        line = re.sub(r"\$\(pointup config (\w+)\)", r"\1.yaml", line)
        if match := re.match(r"(?:accelerate launch .*-m )?pointup (.*)", line):
            found = match[1]
        elif match := re.match(r"accelerate launch .*train\.py(.*)", line):
            found = f"train {match[1]}"
        else:
            continue
        if "..." not in found:
            yield shlex.split(found)


@of_every_page
def test_shell_commands_parse(page: Path) -> None:
    for block in blocks(page, "bash"):
        checked = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True)
        assert checked.returncode == 0 and not checked.stderr, f"{block}{checked.stderr}"


@of_current_pages
def test_options_of_every_command_are_there(page: Path) -> None:
    for command, *words in words_of_pointup(page):
        if command == "train":
            if "--config" in words:
                at = words.index("--config")
                del words[at : at + 2]
            tyro.cli(TrainConfig, args=words)
        elif command in COMMANDS:
            parse([command, *words])
        else:
            assert command in ("config", "--version", "--help"), command


@of_every_page
def test_launch_configurations_are_there_and_gpus_get_as_many_tokens_as_fit(page: Path) -> None:
    for line in command_lines(page):
        names = re.findall(r"pointup config (\w+)|accelerate_configs/(\w+)\.yaml", line)
        for name in map("".join, names):
            folders = ("accelerate_configs", "pointup/presets")
            assert any((ROOT / folder / f"{name}.yaml").exists() for folder in folders), line
            trains = "pointup train" in line or "train.py" in line
            assert name not in ON_GPUS or not trains or "--token-budget auto" in line, line


def test_the_readme_is_short_and_has_the_two_commands_that_a_newcomer_runs_first() -> None:
    assert len(README.read_text().splitlines()) <= 150
    assert 'pip install -e ".[test]" && pytest\n' in README.read_text()
    main = "accelerate launch --config_file accelerate_configs/cpu.yaml train.py"
    assert f"pip install -e . && {main}\n" in README.read_text()
    assert "accelerate_configs/cpu.yaml" in (ROOT / ".ci" / "run").read_text()


def test_the_job_script_is_there() -> None:
    (script,) = [block for block in blocks(CLUSTERS, "bash") if "#SBATCH" in block]
    assert script.startswith("#!/bin/bash\n")


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not there")
def test_the_systemd_unit_is_valid(tmp_path: Path) -> None:
    (unit,) = blocks(CLUSTERS, "ini")
    path = tmp_path / "pointup.service"
    path.write_text(unit)
    checked = subprocess.run(
        ["systemd-analyze", "--user", "verify", str(path)],
        capture_output=True,
        text=True,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
    )
    assert checked.returncode == 0 and not checked.stderr, checked.stderr


@of_every_page
def test_linked_files_are_there(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        in_site = link in GENERATED and page.parent == ROOT / "docs"
        assert link.startswith("https://") or in_site or (page.parent / link).exists(), link


@of_current_pages
def test_named_files_are_there(page: Path) -> None:
    names = re.findall(
        r"(?<![\w./-])((?:pointup|tests|docs|accelerate_configs)/[\w./*-]*)", page.read_text()
    )
    for name in names:
        assert [*ROOT.glob(name.rstrip("."))], name


@of_current_pages
def test_named_modules_and_their_members_are_there(page: Path) -> None:
    for name in re.findall(
        r"(?:`|::: |import )(?!pointup\.json)(pointup(?:\.\w+)+)", page.read_text()
    ):
        parts = name.split(".")
        paths = [ROOT.joinpath(*parts[:end]) for end in range(1, len(parts) + 1)]
        modules = [p for p in paths if p.is_dir() or p.with_suffix(".py").exists()]
        found, rest = (
            importlib.import_module(".".join(parts[: len(modules)])),
            parts[len(modules) :],
        )
        for member in rest:
            assert hasattr(found, member), name
            found = getattr(found, member)


def examples() -> Iterator[tuple[Path, str]]:
    for page in PAGES:
        for block in blocks(page, "python"):
            yield page, block


@pytest.mark.parametrize(
    ("page", "code"), [*examples()], ids=lambda value: getattr(value, "stem", "")
)
def test_examples_print_what_their_comments_say(
    page: Path, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    expected = re.findall(r"^print\(.*?\)\s+# (.*)$", code, re.MULTILINE)
    with redirect_stdout(io.StringIO()) as printed:
        exec(compile(ast.parse(code), str(page), "exec"), {"__name__": "example"})
    assert printed.getvalue().splitlines() == expected
