"""The unit of length of pair datasets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pointup.disk import read_json
from pointup.errors import DataError, PointupError
from pointup.io.length_unit import METRE, UNKNOWN, LengthUnit, unit_of

UNIT, JOINED_UNITS = "metres_per_unit", "joined_units"


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

    It is what `stored_units` wrote: that of the surveys which the pairs were made from. Procedural
    pairs are in metres. All other datasets are `UNKNOWN`.
    """
    info = read_json(Path(directory, "pointup.json"))
    if JOINED_UNITS in info:
        return {Path(name): _unit(metres) for name, metres in info[JOINED_UNITS].items()}
    return {Path(directory): METRE if "recipe" in info else _unit(info.get(UNIT))}


def _unit(metres: object) -> LengthUnit:
    return unit_of(metres) if isinstance(metres, int | float) and metres > 0 else UNKNOWN


def stored_units(units: Mapping[Path, LengthUnit]) -> dict[str, Any]:
    """The entry of pointup.json that `dataset_units` reads, from the units of files or datasets."""
    metres = {str(path): unit.metres for path, unit in units.items() if unit.metres is not None}
    if len(set(metres.values())) > 1:
        return {JOINED_UNITS: metres}
    return {UNIT: next(iter(metres.values()))} if metres else {}
