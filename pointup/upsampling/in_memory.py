"""Upsampling of clouds in memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
import torch

from pointup.io.cloud import PointCloud, check_positions
from pointup.model.upsampler import Upsampler
from pointup.upsampling.attributes import added_dimensions
from pointup.upsampling.executor import Alone
from pointup.upsampling.filtering import PointFilter
from pointup.upsampling.models import is_survey, load_model, shipped_for
from pointup.upsampling.options import UpsampleOptions
from pointup.upsampling.passes import run_passes
from pointup.upsampling.store.point_store import build_survey_store

Cloud = TypeVar("Cloud", np.ndarray, PointCloud)


def upsample(
    points: Cloud,
    ratio: float = 4.0,
    *,
    density: float | None = None,
    model: Upsampler | str | Path | None = None,
    originals: bool = True,
    only_new: bool = False,
    max_distance: float | None = None,
    above_ground: bool | None = None,
    oversampling: float | None = None,
    classes: Sequence[int] | None = None,
    include_noise: bool = False,
    seed: int = 0,
    device: torch.device | str | None = None,
) -> Cloud:
    """The points of a cloud, and new ones between them: `round(ratio * N)` in all.

    A new point lies within 1.5 local spacings of its nearest measured one, whatever the model says:
    of the mean distances of that point to its nearest neighbours, those beyond a gap left out.

    Of an array (N, 3), in any unit and however far from the origin: an array (M, 3) float64 with
    the points as they were, followed by the new ones. Of a `PointCloud`: one with its attributes;
    new points have those of the nearest point (intensity and colours interpolated), and besides
    `synthetic`, `parent_index` and `distance_to_measured`.

    Points of a `PointCloud` whose `classification` is noise (7 or 18), or that are `withheld`, take
    no part: they are neither parents nor neighbours of new points. They are kept beside the
    `round(ratio * n)` points that the n others become; `originals=False` leaves them out.

    The result is what `pointup upsample` writes. It depends on the cloud, the model and these:
        density: points per unit of area on the ground, in place of the ratio; places that are
            denser are left alone.
        model: a model, its directory or its name on the Hub, or one that is shipped: "lidar", the
            default for a cloud read from a format of scanners (LAS, LAZ, E57, PTS, PCD, BIN), or
            "shapes", that for all else.
        originals: without, all `round(ratio * N)` points are made by the model.
        only_new: leave the points themselves out of the result.
        max_distance: make no point farther than this from the nearest one of the cloud.
        above_ground: the third coordinate is a height; make no point below the lowest ones around,
            and give new points class 2 on the ground only. By default for a cloud read from a
            format of scanners, and with the model "lidar".
        oversampling: points drafted for each one that is kept, 1 to 8, in place of what the model
            asks for: 1 is fast, 4 takes five to six times as long and fills more holes.
        classes: upsample only points of these classes, and keep the others.
        include_noise: upsample noise and withheld points, too.
        seed: decides between points that are as good as each other.
        device: by default an accelerator where there is one.

    Raises FileError for points that are not finite, DataError for less than two different ones
    and for classes where the cloud has no `classification`, ConfigError for options that can't be
    met and ModelError where there is no model.
    """
    given: Any = points
    is_cloud = isinstance(given, PointCloud)
    path = given.path if is_cloud else None
    if above_ground is None:
        above_ground = is_survey(path) or model == "lidar"
    options = UpsampleOptions(
        ratio=ratio,
        density=density,
        originals=originals,
        max_distance=max_distance,
        above_ground=above_ground,
        oversampling=oversampling,
        seed=seed,
    )
    point_filter = PointFilter(
        classes=None if classes is None else tuple(classes), include_noise=include_noise
    )
    place = torch.device(device) if device else default_device()
    if model is None:
        model = shipped_for(path)
    loaded = load_model(model, place)
    cloud = given if is_cloud else PointCloud(np.asarray(given).astype(np.float64))
    check_positions(cloud.positions, "points")
    with TemporaryDirectory(prefix="pointup_") as directory:
        store = build_survey_store([[cloud]], Path(directory), takes_part=point_filter)
        made = run_passes(store, loaded, options, Alone(), place)
        parts: list[PointCloud] = list(made.of_file())
    if originals and not only_new:
        defaults = {
            dimension.name: np.arange(len(cloud), dtype=dimension.dtype)
            if dimension.default == "index"
            else np.full(len(cloud), dimension.default, dimension.dtype)
            for dimension in added_dimensions(cloud)
        }
        parts.insert(0, PointCloud(cloud.positions, defaults | cloud.attributes))
    positions = np.concatenate([np.empty((0, 3)), *(part.positions for part in parts)])
    names = parts[0].attributes if parts else {}
    attributes = {name: np.concatenate([part.attributes[name] for part in parts]) for name in names}
    result: Any = PointCloud(positions, attributes, cloud.header, cloud.path)
    return result if is_cloud else result.positions


def default_device() -> torch.device:
    """The accelerator where there is one, otherwise the CPU."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
