"""The unit of length of pair datasets."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pointup.datasets.dataset_units import (
    agreed_dataset_unit,
    dataset_unit,
    known_unit,
    stored_units,
)
from pointup.errors import DataError
from pointup.io.length_unit import METRE, UNKNOWN, LengthUnit, unit_of

FOOT = unit_of(0.3048)


def test_a_dataset_has_the_unit_that_was_stored_with_it(tmp_path):
    def unit(info: dict[str, object]) -> LengthUnit:
        (tmp_path / "pointup.json").write_text(json.dumps(info))
        return dataset_unit(tmp_path)

    for units, expected in (
        ({}, UNKNOWN),
        ({"a.las": UNKNOWN}, UNKNOWN),
        ({"a.las": UNKNOWN, "b.las": FOOT, "c.las": FOOT}, FOOT),
        ({"a.las": unit_of(0.2012)}, unit_of(0.2012)),
        ({"a.las": FOOT, "b.las": METRE}, UNKNOWN),
    ):
        assert unit(stored_units({Path(name): unit for name, unit in units.items()})) == expected
    assert unit({"recipe": 1}) == METRE
    assert unit({"metres_per_unit": "x"}) == dataset_unit(tmp_path / "elsewhere") == UNKNOWN


def test_the_units_of_joined_datasets_are_named_if_they_differ(tmp_path):
    info = stored_units({Path("feet"): FOOT, Path("metres"): METRE, Path("unknown"): UNKNOWN})
    (tmp_path / "pointup.json").write_text(json.dumps(info))
    with pytest.raises(DataError, match="joined of feet in ft, metres in m; evaluate these one by"):
        agreed_dataset_unit(tmp_path)


def test_no_file_that_a_dataset_was_made_from_is_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.las")
    info = {"inputs": ["/", str(tmp_path / "pipe.las")], "made_by": "pointup 1 prepare thin"}
    (tmp_path / "pointup.json").write_text(json.dumps(info))
    assert dataset_unit(tmp_path) == UNKNOWN


def test_several_datasets_have_a_unit_if_it_is_known_and_the_same(tmp_path):
    for name, info in (
        ("scenes", '{"recipe": 1}'),
        ("more", '{"recipe": 1}'),
        ("unknown", "{}"),
        ("damaged", "{"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "pointup.json").write_text(info)

    def unit(*names: str) -> str:
        return known_unit(tmp_path / name for name in names)

    assert unit("scenes", "more") == "m"
    assert unit("unknown") == unit("scenes", "unknown") == unit("scenes", "damaged") == ""
    assert unit("gone") == ""
