"""What `pointup evaluate lidar` shows of the surveys: a picture, and the viewer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pointup.evaluation.cloud_metrics import Figures
from pointup.evaluation.common_extent import Extent
from pointup.io.length_unit import LengthUnit
from pointup.visualization import columns_picture, maps_picture, save_picture, stacked
from pointup.visualization.viewer import compare_with_reference, write_viewer

COLUMNS = {
    "source": "source",
    "midpoints": "midpoint baseline",
    "prediction": "prediction",
    "model": "model",
    "resampled": "second survey",
}
"""Surveys of a picture, from left to right, and their titles."""


@dataclass(frozen=True, eq=False)
class ShownSurveys:
    """Surveys (N, 3) by name, and their reference, on the common extent and in `unit`."""

    surveys: dict[str, np.ndarray]
    reference: np.ndarray
    extent: Extent
    unit: LengthUnit

    @property
    def unit_name(self) -> str:
        return "" if self.unit.metres is None else self.unit.name


def write_lidar_picture(shown: ShownSurveys, rows: dict[str, Figures], path: Path) -> None:
    """Write columns and maps of the surveys on the common extent, with their Chamfer distances.

    Raises FileError if the file can't be written.
    """
    names = [name for name in COLUMNS if name in shown.surveys]
    clouds = {COLUMNS[name]: _inside(shown, shown.surveys[name]) for name in names}
    unit = shown.unit_name
    notes = {COLUMNS[name]: f"Chamfer {rows[name]['chamfer']:.3g} {unit}".strip() for name in names}
    reference = _inside(shown, shown.reference)
    pictures = [
        columns_picture(clouds, reference, unit=unit, notes=notes),
        maps_picture(clouds, reference, unit=unit),
    ]
    save_picture(stacked(pictures), path)


def write_lidar_view(shown: ShownSurveys, path: Path, title: str) -> None:
    """Write a viewer of source, prediction and reference, coloured by the distance to it.

    Raises FileError if the file can't be written.
    """
    first = [name for name in ("source", "prediction", "model") if name in shown.surveys]
    # Beyond the common extent distances would measure the edge of the other survey.
    surveys = {name: _inside(shown, shown.surveys[name]) for name in first or shown.surveys}
    scene = compare_with_reference(surveys, _inside(shown, shown.reference), shown.unit_name)
    write_viewer(path, [scene], title)


def _inside(shown: ShownSurveys, cloud: np.ndarray) -> np.ndarray:
    return cloud[shown.extent.contains(cloud)]
