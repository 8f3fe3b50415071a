"""Statistics of a file of points, as `pointup inspect` prints them: uncertainty by class."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from pointup.cli.input_files import find_inputs
from pointup.evaluation.report import aligned
from pointup.io.cloud import CLASSIFICATION, attribute, is_synthetic
from pointup.io.files import iter_points, point_extensions
from pointup.io.length_unit import UNKNOWN, units_of_readable
from pointup.terminal import printable
from pointup.upsampling.attributes import UNCERTAINTY
from pointup.upsampling.new_points import UncertaintyByClass
from pointup.visualization.viewer.scenes import CLASS_NAMES


def inspect_file(path: Path) -> dict[str, Any]:
    """The content of `pointup inspect --json` of a file of points, or of those in a folder or
    virtual point cloud. Raises the errors of `find_inputs` and `iter_points`."""
    num_points, num_new, uncertain = 0, 0, UncertaintyByClass()
    files = find_inputs([path], point_extensions)
    for cloud in chain.from_iterable(map(iter_points, files)):
        is_new = is_synthetic(cloud)
        num_points, num_new = num_points + len(cloud), num_new + int(is_new.sum())
        if (uncertainty := attribute(cloud, UNCERTAINTY)) is not None:
            classes = attribute(cloud, CLASSIFICATION)
            classes = np.zeros(len(cloud)) if classes is None else classes
            # Other programs may have changed it.
            known = is_new & (uncertainty > 0) & (uncertainty < 1e30)
            uncertain.add(uncertainty[known], classes[known])
    return {
        "file": str(path),
        "num_points": num_points,
        "num_new": num_new,
        "unit": units_of_readable(files).get(files[0], UNKNOWN).name,
        "uncertainty": {of: found._asdict() for of, found in uncertain.found().items()},
    }


def report(found: dict[str, Any]) -> str:
    """The text that `pointup inspect` prints of a file."""
    text = f"{found['file']}: {found['num_points']:,} points, {found['num_new']:,} of them new"
    if not found["uncertainty"]:
        return printable(f"{text}, no uncertainty")
    unit = found["unit"]
    table = [["uncertainty of new points", "points", f"median ({unit})", f"90 % ({unit})"]]
    for of, row in found["uncertainty"].items():
        name = "all" if of == "all" else f"class {of}, {CLASS_NAMES.get(int(of), 'other')}"
        numbers = (f"{row[key]:.3g}" for key in ("median", "within_90"))
        table.append([name, f"{row['num_points']:,}", *numbers])
    return printable("\n".join([text, *aligned(table, "<>>>")]))
