from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch

from pointup.benchmark.machine import device_named, machine_differences
from pointup.benchmark.section import Column, Effort, Row, Section
from pointup.benchmark.sections import ALL, SEARCH_CLOUDS, ragged
from pointup.benchmark.training_step import training_batch
from pointup.cli.bench import Bench
from pointup.errors import ConfigError, FileError

CPU = torch.device("cpu")


def test_clouds_have_the_requested_sizes():
    pos, ptr = ragged(1000, CPU)
    assert len(pos) == 1000
    assert (ptr[1:] - ptr[:-1]).tolist() == [28, 55, 84, 111, 139, 166, 195, 222]
    assert len(ptr) == SEARCH_CLOUDS + 1
    batch = training_batch([10, 20])
    assert batch.ptr.tolist() == [0, 10, 30]
    assert batch.target_ptr.tolist() == [0, 40, 120]


@pytest.mark.usefixtures("small_bench")
def test_small_sizes_of_every_section_give_figures():
    for section in ALL:
        rows = list(section.measure(Effort(quick=True, device=CPU)))
        assert rows
        for row in rows:
            assert {column.name for column in section.columns} == row.keys(), section.name
            assert all(row[c.name] > 0 for c in section.columns if c.better == "higher"), row
        assert len(section.table(rows).splitlines()) == len(rows) + 1


def table(rows: list[Row]) -> Section:
    def measure(effort: Effort) -> Iterator[Row]:
        yield from rows

    columns = (
        Column("size", "points", ",", is_key=True),
        Column("rate", "points/s", ",.0f", "higher"),
        Column("seconds", "seconds", ".1f", "lower"),
    )
    return Section("reading", "A table", columns, measure)


def test_changes_are_reported_with_their_direction():
    before = [{"size": size, "rate": 100.0, "seconds": 1.0} for size in (10, 20, 30)]
    after = [
        {"size": 10, "rate": 200.0, "seconds": 2.0},
        {"size": 20, "rate": 101.0, "seconds": 1.0},
        {"size": 1000, "rate": 1.0, "seconds": 1.0},
    ]
    assert table(after).changes(before, after) == [
        "10: points/s 100 -> 200, 2.00x, better",
        "10: seconds 1.0 -> 2.0, 2.00x, worse",
    ]


def test_figures_are_printed_written_and_compared(tmp_path, monkeypatch, capsys):
    rows = [{"size": 10, "rate": 1000.0, "seconds": 1.0}]
    monkeypatch.setattr("pointup.benchmark.sections.ALL", (table(rows),))
    old = tmp_path / "old.json"
    assert Bench(quick=True, json=old).run() == 0
    printed = capsys.readouterr().out
    assert "torch " + torch.__version__.partition("+")[0] in printed
    assert "10          1,000       1.0" in printed
    written = json.loads(old.read_text())
    assert written["sections"]["reading"] == rows
    assert written["machine"]["quick"] is True
    slower = table([{**rows[0], "rate": 500.0}])
    monkeypatch.setattr("pointup.benchmark.sections.ALL", (slower,))
    Bench(compare=old).run()
    printed = capsys.readouterr().out
    assert "reading: 10: points/s 1,000 -> 500, 0.50x, worse" in printed
    # Before the sections and with the figures.
    assert printed.count("old.json was not measured in the same way:\nquick: True -> False") == 2
    Bench(compare=old, quick=True).run()
    assert "quick" not in capsys.readouterr().out


def test_differences_of_machines_are_listed_but_for_small_ones_of_their_load():
    before = {"cores": 2, "load": 0.1, "device": "cpu", "old": 1}
    assert machine_differences(before, {**before, "load": 0.5}) == []
    after = {"cores": 64, "load": 9.5, "device": "cpu", "gpu": "H"}
    assert machine_differences(before, after) == [
        "cores: 2 -> 64",
        "load: 0.1 -> 9.5",
        "old: 1 -> None",
        "gpu: None -> H",
    ]


@pytest.mark.parametrize("name", ["gpu", "cuda", "cuda:1", "meta", ""])
def test_a_device_that_torch_does_not_see_is_refused_in_a_line(name, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    with pytest.raises(ConfigError, match=r"^--device .*: give one that torch sees: cpu \(.+\)$"):
        Bench(device=name).run()


def test_devices_are_those_that_torch_sees(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    for name in ("cpu", "cuda", "cuda:1"):
        assert device_named(name) == torch.device(name)
    with pytest.raises(ConfigError, match=r"torch sees: cpu, cuda:0, cuda:1$"):
        device_named("cuda:2")


def test_files_that_cannot_be_read_or_written_are_refused_before_measuring(tmp_path, monkeypatch):
    monkeypatch.setattr("pointup.benchmark.machine.describe_machine", pytest.fail)
    with pytest.raises(FileError, match=r"none\.json"):
        Bench(compare=tmp_path / "none.json").run()
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(FileError, match=r"list\.json: not written by pointup bench"):
        Bench(compare=tmp_path / "list.json").run()
    with pytest.raises(FileError, match="there is no folder"):
        Bench(json=tmp_path / "missing" / "new.json").run()
    with pytest.raises(FileError, match="is a folder"):
        Bench(json=tmp_path).run()
