"""`pointup prepare` on surveys in degrees, in feet, in two units, in two coordinate systems."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import survey_files
from survey_files import UTM_CORNER

from pointup.cli.main import main
from pointup.datasets import regions
from pointup.datasets.dataset_units import dataset_unit
from pointup.io.length_unit import UNKNOWN

METRES, FEET, DEGREES = 32618, 2263, 4326
FEET_ABOVE_METRES = "EPSG:32618+6360"


def write_las(path: Path, system: int | str, num_points: int) -> Path:
    points = UTM_CORNER + np.random.default_rng(num_points).random((num_points, 3)) * 40
    return survey_files.write_las(path, points, system=system)


def prepare(*words: object) -> int:
    options = ("--num-workers", 1, "--min-points", 4)
    return main(["prepare", *(str(word) for word in (*words, *options))])


@pytest.mark.parametrize("large_bytes", [0, regions.LARGE_BYTES])
def test_surveys_in_different_units_or_in_degrees_are_refused_before_any_work(
    large_bytes, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(regions, "LARGE_BYTES", large_bytes)
    metres = write_las(tmp_path / "m.las", METRES, 3000)
    feet = write_las(tmp_path / "ft.las", FEET, 900)
    degrees = write_las(tmp_path / "deg.las", DEGREES, 800)
    out = tmp_path / "out" / "pairs"
    assert prepare("pairs", "--source", feet, "--target", metres, "-o", out) == 1
    assert f"{metres}: is in m, {feet} in US ft; reproject" in capsys.readouterr().err
    assert prepare("pairs", "--source", degrees, "--target", metres, "-o", out) == 1
    assert f"{degrees}: its coordinates are in degrees" in capsys.readouterr().err
    assert prepare("thin", degrees, "-o", out) == 1
    assert f"{degrees}: its coordinates are in degrees" in capsys.readouterr().err
    assert not out.parent.exists()


def test_heights_in_another_unit_are_noted_and_the_unit_of_the_pairs_is_unknown(tmp_path, capsys):
    mixed = write_las(tmp_path / "mixed.las", FEET_ABOVE_METRES, 3000)
    out = tmp_path / "pairs"
    assert prepare("thin", mixed, "-o", out, "--ratio", 2) == 0
    note = f"note: {mixed}: by its coordinate system, heights are in another unit than x and y"
    assert capsys.readouterr().err.startswith(note)
    assert dataset_unit(out) == UNKNOWN


def test_datasets_in_feet_and_metres_are_joined_with_a_note_and_not_evaluated_as_one(
    tmp_path, capsys
):
    folders = []
    for name, system in (("feet", FEET), ("metres", METRES)):
        survey = write_las(tmp_path / f"{name}.las", system, 3000)
        folders.append(tmp_path / name)
        assert prepare("thin", survey, "--tile", 20, "-o", folders[-1]) == 0
    joined = tmp_path / "joined"
    capsys.readouterr()
    assert main(["prepare", "join", *map(str, folders), "-o", str(joined)]) == 0
    assert "note: the datasets are in US ft and m" in capsys.readouterr().err
    assert main(["evaluate", "pairs", str(joined)]) == 1
    expected = f"{joined}: joined of {folders[0]} in US ft, {folders[1]} in m; evaluate these one"
    assert expected in capsys.readouterr().err


def test_surveys_whose_headers_name_different_systems_are_paired_with_a_note(tmp_path, capsys):
    for name, system in (("a", 25832), ("b", 25833), ("also_a", "EPSG:25832+7837")):
        for number in range(2):
            write_las(tmp_path / f"{name}{number}.las", system, 900 + number)

    def side(name: str) -> list[Path]:
        return [tmp_path / f"{name}{number}.las" for number in range(2)]

    note = (
        f"note: {tmp_path}/b0.las: is in ETRS89 / UTM zone 33N by its header, "
        f"and {tmp_path}/a0.las in ETRS89 / UTM zone 32N"
    )
    for number, words in enumerate([(), ("--separate", "--by-order")]):
        for name in ("b", "also_a"):
            out = tmp_path / f"{name}_{number}"
            sides = ("--source", *side("a"), "--target", *side(name))
            assert prepare("pairs", *sides, "-o", out, *words) == 0
            assert capsys.readouterr().err.count(note) == (name == "b")
    # Separate surveys may each have their own system.
    assert prepare("thin", *side("a"), *side("b"), "-o", tmp_path / "thin", "--separate") == 0
    assert "UTM zone" not in capsys.readouterr().err


def test_surveys_in_different_systems_are_measured_and_shown_with_a_note(tmp_path, capsys):
    west, east = (str(write_las(tmp_path / f"{code}.las", code, 300)) for code in (25832, 25833))
    note = f"note: {east}: is in ETRS89 / UTM zone 33N by its header, and {west} in ETRS89 / UTM"
    assert main(["evaluate", "lidar", "--reference", west, "--prediction", east]) == 0
    assert note in capsys.readouterr().out
    page = ["-o", str(tmp_path / "page.html")]
    assert main(["view", west, east, *page]) == 0
    assert note in capsys.readouterr().err
    assert main(["view", west, west, *page, "--names", "one", "two"]) == 0
    assert "UTM" not in capsys.readouterr().err
