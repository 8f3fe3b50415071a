"""`--help`: the help of an option is one paragraph, whatever the lines of its docstring."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields

import pytest

from pointup.cli import main as cli
from pointup.training.config import TrainConfig, parse_command_line

WIDTH = 4000
SUBCOMMANDS = {
    "prepare": ("meshes", "clouds", "thin", "pairs", "scenes", "join", "h5", "default"),
    "evaluate": ("lidar", "shapes", "pairs"),
}
COMMANDS = [
    [name, *sub]
    for name in cli.COMMANDS
    if name != "train"
    for sub in ([[]] if name not in SUBCOMMANDS else [[s] for s in SUBCOMMANDS[name]])
]


def help_of(run: Callable[[], object], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as end:
        run()
    assert end.value.code == 0
    return capsys.readouterr().out


def broken(text: str) -> list[str]:
    """Lines that continue a help text, although a line has room for any."""
    is_help = [re.match(r"[│ ] {6,}[^ │]", line) is not None for line in text.splitlines()]
    pairs = zip(text.splitlines(), is_help, [False, *is_help], strict=False)
    return [line.strip() for line, here, before in pairs if here and before]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_texts_of_commands_are_paragraphs(words, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    text = help_of(lambda: cli.parse([*words, "--help-all"]), capsys)
    assert "--help" in text
    assert broken(text) == []
    about = text.partition("╭")[0].splitlines()
    assert not [line for line in about if re.match(r"--|\$", line)]


def test_help_texts_of_training_are_paragraphs(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    text = help_of(lambda: parse_command_line(["--help-all"], "Trains."), capsys)
    assert "--model.quota-exponent" in text and "--loss.coverage" in text
    assert broken(text) == []


def test_help_leaves_out_what_is_rarely_set_and_both_are_options(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    text = help_of(lambda: parse_command_line(["--help"], "Trains."), capsys)
    assert "--steps" in text and "--model.k" not in text and "--hang-timeout" not in text
    assert parse_command_line(["--model.k", "12"], "Trains.").model.k == 12
    text = help_of(lambda: cli.parse(["upsample", "--help"]), capsys)
    assert "--ratio" in text and "--shard" not in text
    assert cli.parse(["upsample", "a.las", "-o", "b.las", "--shard", "1/2"]).shard == "1/2"
    for command in (TrainConfig, cli.command_class("upsample")):
        assert {*command.RARELY_SET.split()} < {each.name for each in fields(command)}
