"""The README and the documentation: links, names, commands and examples are right.

Each check of the text is one test, which lists all offenders.
"""

from __future__ import annotations

import ast
import importlib
import io
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path

import pytest
from conftest import ROOT

from pointup.cli.main import COMMANDS, parse
from pointup.training.config import parse_command_line

DOCS = ROOT / "docs"
README = ROOT / "README.md"
CLUSTERS = DOCS / "guides" / "clusters.md"
SITE = sorted(DOCS.rglob("*.md"))
CARDS = sorted((ROOT / "pointup" / "weights").rglob("*.md"))
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *SITE, *CARDS]
ON_GPUS = ("1gpu", "8gpu", "2x8gpu")
MOST_WORDS = 20_000


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


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


@cache
def is_accepted(command: str, *words_of_page: str) -> bool:
    """Whether pointup knows a command and all of its options."""
    words = list(words_of_page)
    if command != "train" and command not in COMMANDS:
        return command in ("config", "--version", "--help")
    try:
        with redirect_stderr(io.StringIO()):
            if command == "train":
                if "--config" in words:
                    at = words.index("--config")
                    del words[at : at + 2]
                parse_command_line(words, "")
            else:
                parse([command, *words])
    except SystemExit:
        return False
    return True


def headings(page: Path) -> set[str]:
    """The anchors of the headings of a page."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


def test_shell_commands_parse():
    wrong = []
    for page in PAGES:
        script = "\n".join(blocks(page, "bash"))
        done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
        if done.returncode or done.stderr:
            wrong.append(f"{name_of(page)}: {done.stderr}")
    assert not wrong, "\n".join(wrong)


def test_every_command_and_its_options_are_there():
    wrong = [
        f"{name_of(page)}: pointup {shlex.join([command, *words])}"
        for page in PAGES
        for command, *words in words_of_pointup(page)
        if not is_accepted(command, *words)
    ]
    assert not wrong, "\n".join(wrong)


def test_launch_configurations_are_there_and_gpus_get_as_many_tokens_as_fit():
    wrong = []
    for page in PAGES:
        for line in command_lines(page):
            found = re.findall(r"pointup config (\w+)|accelerate_configs/(\w+)\.yaml", line)
            names = ["".join(groups) for groups in found]
            folders = [ROOT / "accelerate_configs", ROOT / "pointup" / "presets"]
            files = {path.stem for folder in folders for path in folder.glob("*.yaml")} | {"qgis"}
            missing = [name for name in names if name not in files]
            trains = "pointup train" in line or "train.py" in line
            fits = not trains or "--token-budget auto" in line
            if missing or not (fits or set(names).isdisjoint(ON_GPUS)):
                wrong.append(f"{name_of(page)}: {line}")
    assert not wrong, "\n".join(wrong)


def test_the_documentation_can_be_read_to_its_end():
    words = {name_of(page): len(page.read_text().split()) for page in [README, *SITE]}
    listed = "\n".join(f"{count:6,} {name}" for name, count in words.items())
    assert sum(words.values()) <= MOST_WORDS, f"{sum(words.values())} words:\n{listed}"


def test_the_readme_is_short_and_has_the_two_commands_that_a_newcomer_runs_first():
    assert len(README.read_text().splitlines()) < 130
    assert 'pip install -e ".[test]" && pytest\n' in README.read_text()
    main = "accelerate launch --config_file accelerate_configs/cpu.yaml train.py"
    assert f"pip install -e . && {main}\n" in README.read_text()
    assert "accelerate_configs/cpu.yaml" in (ROOT / ".ci" / "run").read_text()


def test_the_job_script_is_there():
    (script,) = [block for block in blocks(CLUSTERS, "bash") if "#SBATCH" in block]
    assert script.startswith("#!/bin/bash\n")


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not there")
def test_the_systemd_unit_is_valid(tmp_path):
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


def test_links_lead_to_files_and_headings():
    wrong = []
    for page in PAGES:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            if link.startswith("https://"):
                continue
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            if not target.exists() or (anchor and anchor not in headings(target)):
                wrong.append(f"{name_of(page)}: {link}")
    assert not wrong, "\n".join(wrong)


def test_named_files_are_there():
    pattern = r"(?<![\w./-])((?:pointup|tests|docs|accelerate_configs)/[\w./*-]*)"
    wrong = [
        f"{name_of(page)}: {name}"
        for page in PAGES
        for name in re.findall(pattern, page.read_text())
        if not [*ROOT.glob(name.rstrip("."))]
    ]
    assert not wrong, "\n".join(wrong)


def is_importable(name: str) -> bool:
    """Whether a dotted name is a module, or a member of one."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for member in parts[end:]:
            if not hasattr(found, member):
                return False
            found = getattr(found, member)
        return True
    return False


def test_named_modules_and_their_members_are_there():
    pattern = r"(?:`|::: |import |from )(?!pointup\.(?:json|service))(pointup(?:\.\w+)+)"
    wrong = [
        f"{name_of(page)}: {name}"
        for page in PAGES
        for name in re.findall(pattern, page.read_text())
        if not is_importable(name)
    ]
    assert not wrong, "\n".join(wrong)


def test_what_the_scripts_of_the_docs_import_is_there():
    wrong = [
        f"{name_of(script)}: {node.module}.{each.name}"
        for script in sorted(DOCS.glob("*.py"))
        for node in ast.walk(ast.parse(script.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pointup")
        for each in node.names
        if not is_importable(f"{node.module}.{each.name}")
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("page", "code"),
    [(page, block) for page in PAGES for block in blocks(page, "python")],
    ids=lambda value: getattr(value, "stem", ""),
)
def test_examples_print_what_their_comments_say(page, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = re.findall(r"^print\(.*?\)\s+# (.*)$", code, re.MULTILINE)
    with redirect_stdout(io.StringIO()) as printed:
        exec(compile(ast.parse(code), str(page), "exec"), {"__name__": "example"})
    assert printed.getvalue().splitlines() == expected


def test_the_conda_recipe_needs_what_the_wheel_needs():
    renamed = {
        "pytorch": "torch",
        "pytorch_geometric": "torch_geometric",
        "igl": "libigl",
        "matplotlib-base": "matplotlib",
    }
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    wanted = {
        re.sub(r"\[.*\]|;.*", "", requirement).replace("-", "_").partition(">=")[::2]
        for requirement in requirements
        if "python_version <" not in requirement  # That of pip's wheels.
    }
    recipe = (ROOT / "conda" / "meta.yaml").read_text().split("  run:\n")[1].split("\n\n")[0]
    found = set()
    for line in recipe.splitlines():
        name, _, versions = line.removeprefix("    - ").partition(" >=")
        found.add((renamed.get(name, name).replace("-", "_"), versions))
    assert found - wanted == {("python", "3.11"), ("lazrs_python", "")} and wanted <= found
