"""Statistics of a file of points, as `pointup inspect` prints them: coordinate system, extent,
density, classes, and the uncertainty of new points."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from pointup.cli.input_files import find_inputs
from pointup.evaluation.report import aligned
from pointup.geometry.grids import box_of
from pointup.io.cloud import (
    CLASSIFICATION,
    MUCH_VEGETATION,
    NUMBER_OF_RETURNS,
    attribute,
    is_synthetic,
    is_vegetation,
)
from pointup.io.files import iter_points, point_extensions
from pointup.io.length_unit import UNKNOWN, different_systems, units_of_readable
from pointup.terminal import printable
from pointup.upsampling.attributes import UNCERTAINTY
from pointup.upsampling.ground import occupied_area
from pointup.upsampling.new_points import UncertaintyByClass
from pointup.visualization.viewer.scenes import CLASS_NAMES

# Largest numbers of points that tell which ground is covered, of a chunk and in all, and of places
# that tell how many are in several files.
_MOST_OF_CHUNK, _MOST_PLACES, _MOST_KEYS = 100_000, 4_000_000, 2_000_000


def inspect_files(paths: Sequence[Path]) -> dict[str, Any]:
    """The content of `pointup inspect --json` of files of points, of those in folders and of
    virtual point clouds, as one. Raises the errors of `find_inputs` and `iter_points`."""
    count, counts, uncertain = Counter[str](), Counter[int](), UncertaintyByClass()
    boxes, places, keys = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
    step, num_bits = 1, 3
    files = find_inputs(paths, point_extensions)
    for cloud in chain.from_iterable(map(iter_points, files)):
        is_new = is_synthetic(cloud)
        returns, classes = attribute(cloud, NUMBER_OF_RETURNS), attribute(cloud, CLASSIFICATION)
        count["num_points"] += len(cloud)
        count["num_new"] += int(is_new.sum())
        count["num_vegetation"] += int(is_vegetation(cloud).sum())
        count["num_several_returns"] += 0 if returns is None else int((returns > 1).sum())
        if classes is not None:
            counts.update(classes[(classes >= 0) & (classes < 256)].astype(int).tolist())
        boxes += box_of(cloud.positions)
        # Copied: a part of the positions would keep all in memory.
        places.append(cloud.positions[:: step * (len(cloud) // _MOST_OF_CHUNK + 1), :2].copy())
        if sum(map(len, places)) > _MOST_PLACES:
            step, places = 2 * step, [part[::2] for part in places]
        if len(files) > 1:
            keys.append(_some(_keys(cloud.positions), num_bits))
        while sum(map(len, keys)) > _MOST_KEYS:
            num_bits += 1
            keys = [_some(part, num_bits) for part in keys]
        if (uncertainty := attribute(cloud, UNCERTAINTY)) is not None:
            classes = np.zeros(len(cloud)) if classes is None else classes
            # Other programs may have changed it.
            known = is_new & (uncertainty > 0) & (uncertainty < 1e30)
            uncertain.add(uncertainty[known], classes[known])
    unit = units_of_readable(files).get(files[0], UNKNOWN)
    is_length = unit == UNKNOWN or unit.metres is not None
    area = occupied_area(np.concatenate(places)) if is_length else 0.0
    some = np.concatenate([*keys, np.empty(0, np.uint64)])
    num_places = count["num_points"] * (len(np.unique(some)) / len(some) if len(some) else 1.0)
    return {
        "file": f"{paths[0]} and {len(paths) - 1} more" if len(paths) > 1 else str(paths[0]),
        **count,
        "systems": list(different_systems(files).values()),
        "unit": unit.name,
        "low": np.min(boxes, axis=0).tolist(),
        "high": np.max(boxes, axis=0).tolist(),
        "density": num_places / area if area else None,
        "classes": {str(value): counts[value] for value in sorted(counts)},
        "uncertainty": {of: found._asdict() for of, found in uncertain.found().items()},
    }


def _keys(positions: np.ndarray) -> np.ndarray:
    """Keys uint64 of the places of positions (N, 3), equal for a place that is in several files, as
    in tiles with a buffer."""
    x, y, z = np.round(positions.T * 1e6).view(np.uint64)
    keys = (x * np.uint64(0x9E3779B97F4A7C15) + y) * np.uint64(0xBF58476D1CE4E5B9) + z
    return (keys ^ keys >> np.uint64(31)) * np.uint64(0x94D049BB133111EB)


def _some(keys: np.ndarray, num_bits: int) -> np.ndarray:
    """Those of the keys whose first bits are 0: the same in all files."""
    return keys[keys >> np.uint64(64 - num_bits) == 0]


def report(found: dict[str, Any]) -> str:
    """The text that `pointup inspect` prints of a file."""
    num, unit = found["num_points"], found["unit"]
    text = f"{found['file']}: {num:,} points, {found['num_new']:,} of them new"
    lines = [text if found["uncertainty"] else f"{text}, no uncertainty", *_described(found)]
    if found["uncertainty"]:
        table = [["uncertainty of new points", "points", f"median ({unit})", f"90 % ({unit})"]]
        for of, row in found["uncertainty"].items():
            numbers = (f"{row[key]:.3g}" for key in ("median", "within_90"))
            table.append([_class(of), f"{row['num_points']:,}", *numbers])
        lines += aligned(table, "<>>>")
    return printable("\n".join(lines))


def _described(found: dict[str, Any]) -> list[str]:
    """Lines on the points of a file, measured or new."""
    num, unit, density = (found[key] for key in ("num_points", "unit", "density"))
    sides = " x ".join(_rounded(b - a, 4) for a, b in zip(found["low"], found["high"], strict=True))
    several, vegetation = found["num_several_returns"] / num, found["num_vegetation"] / num
    is_for_forest = vegetation > MUCH_VEGETATION and not found["num_new"]
    advice = ": try upsample --model forest" if is_for_forest else ""
    lines = {
        "coordinate system": "; ".join(found["systems"]) or "not known",
        "unit": "not known" if unit == UNKNOWN.name else unit,
        "extent": f"{sides}, from {', '.join(f'{a:.8g}' for a in found['low'])}",
        "density": density and f"{_rounded(density, 3)} points per square {unit}, seen from above",
        "several returns": several and f"{several:.0%}",
        "vegetation": vegetation and f"{vegetation:.0%}{advice}",
    }
    lines |= {_class(of): f"{n:,} points, {n / num:.0%}" for of, n in found["classes"].items()}
    return aligned([[f"  {name}", text] for name, text in lines.items() if text], "<<")


def _rounded(value: float, digits: int) -> str:
    """A value with so many digits, or with all its whole ones."""
    return f"{value:.{digits}g}" if value < 10 ** (digits - 1) else f"{value:,.0f}"


def _class(of: str) -> str:
    return "all" if of == "all" else f"class {of}, {CLASS_NAMES.get(int(of), 'other')}"
