"""The unit of length of pair datasets, by the files that they were made from."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pointup.disk import read_json
from pointup.errors import DataError, PointupError
from pointup.io.length_unit import (
    METRE,
    MIXED,
    UNKNOWN,
    LengthUnit,
    agreed_unit,
    units_of_readable,
)


def dataset_unit(directory: str | Path) -> LengthUnit:
    """The unit of a pair dataset; `UNKNOWN` if it was joined of datasets in different units."""
    units = set(dataset_units(directory).values()) - {UNKNOWN}
    return units.pop() if len(units) == 1 else UNKNOWN


def readable_unit(directory: str | Path) -> LengthUnit:
    """`dataset_unit`; `UNKNOWN` if the description of the dataset can't be read."""
    try:
        return dataset_unit(directory)
    except (PointupError, OSError, ValueError):
        return UNKNOWN


def known_unit(directories: Iterable[str | Path]) -> str:
    """The name of the common unit of pair datasets, for tables of figures.

    Empty if it is unknown, if the datasets differ, or if their descriptions can't be read.
    """
    units = set(map(readable_unit, directories))
    found = units.pop() if len(units) == 1 else UNKNOWN
    return found.name if found.metres is not None else ""


def agreed_dataset_unit(directory: str | Path) -> LengthUnit:
    """`dataset_unit`. Raises DataError for a dataset joined of datasets in different units."""
    units = {path: unit for path, unit in dataset_units(directory).items() if unit != UNKNOWN}
    if len(set(units.values())) > 1:
        named = ", ".join(f"{path} in {unit.name}" for path, unit in units.items())
        raise DataError(f"{directory}: joined of {named}; evaluate these one by one")
    return dataset_unit(directory)


def dataset_units(directory: str | Path) -> dict[Path, LengthUnit]:
    """The unit of a pair dataset, or of each one that it was joined of, by directory.

    It is that of the input files, if these still exist and can be read. Procedural pairs are in
    metres. All other datasets are `UNKNOWN`.
    """
    info = read_json(Path(directory, "pointup.json"))
    if "recipe" in info:
        return {Path(directory): METRE}
    named = [Path(name) for side in ("inputs", "source", "target") for name in info.get(side, ())]
    if str(info.get("made_by", "")).endswith("prepare join"):
        return {leaf: unit for path in named for leaf, unit in dataset_units(path).items()}
    files = [f for path in named for f in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    units_of_files = units_of_readable([file for file in files if file.is_file()])
    # `pointup prepare` took the heights of these to be in the unit of x and y.
    lengths = {file: unit for file, unit in units_of_files.items() if unit != MIXED}
    return {Path(directory): agreed_unit(lengths)}
