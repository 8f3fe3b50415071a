"""`pointup.upsample`: upsampling of arrays and `PointCloud`s in memory; loads models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from pointup.disk import temporary_directory
from pointup.errors import ConfigError, DataError, ModelError
from pointup.io.cloud import (
    PointCloud,
    as_float64,
    cast_values,
    check_attributes,
    check_magnitudes,
    check_positions,
)
from pointup.io.files import SCANNER_EXTENSIONS
from pointup.model.config import ModelConfig
from pointup.model.upsampler import Upsampler
from pointup.upsampling.attributes import added_dimensions
from pointup.upsampling.executor import SingleProcess
from pointup.upsampling.filtering import PointFilter
from pointup.upsampling.new_points import NewPoints
from pointup.upsampling.options import DEFAULT_RATIO, UpsampleOptions
from pointup.upsampling.passes import run_passes
from pointup.upsampling.scatter import has_little_noise
from pointup.upsampling.store.point_store import build_survey_store

Cloud = TypeVar("Cloud", np.ndarray, PointCloud)


def upsample(
    points: Cloud,
    ratio: float | None = None,
    *,
    density: float | None = None,
    model: Upsampler | str | Path | None = None,
    originals: bool = True,
    denoise: bool = False,
    only_new: bool = False,
    max_distance: float | None = None,
    max_uncertainty: float | None = None,
    above_ground: bool | None = None,
    ground_density: float | None = None,
    oversampling: float | None = None,
    classes: Sequence[int] | None = None,
    include_noise: bool = False,
    uncertainty: bool = True,
    seed: int = 0,
    device: torch.device | str | None = None,
) -> Cloud:
    """Upsample a cloud to `round(ratio * N)` points: the N measured points, and new ones.

    Points in the same place count once: new points are made for one of them, and all are kept.

    An array (N, 3), in any unit and any distance from the origin, gives an array (M, 3) float64:
    the input points unchanged, followed by the new ones. A `PointCloud` gives a `PointCloud` with
    the same attributes: new points have those of the nearest measured point (intensity and colours
    are interpolated). It has four attributes more: `synthetic`, `parent_index`,
    `distance_to_measured` and, if the model predicts it, `uncertainty`: the distance to the true
    surface that nine in ten new points with this value stay within.

    Every new point lies within 1.5 local spacings of its nearest measured point (8 with the model
    "forest"), whatever the weights of the model. The local spacing of a point is the mean distance
    to its nearest neighbours, without those across a gap. Farther away are only the points that
    continue the ground of a survey below crowns (`ground_density`).

    Points of a `PointCloud` whose `classification` is noise (7 or 18), or that are `withheld`, are
    neither parents nor neighbours of new points. They are copied to the result; the other n points
    become `round(ratio * n)`. `originals=False` leaves all measured points out.

    The result is what `pointup upsample` writes, up to the resolution of the file. Options:
        ratio: output points for each input point, 1 or more; by default 4.
        density: target density in points per unit of area on the ground, instead of a ratio. Places
            that are denser already get no new points.
        model: a model, its directory, its name on the Hub, or an included model: "lidar" (the
            default for a cloud read from a scanner format: LAS, LAZ, E57, PTS, PCD, BIN), "forest",
            "noisy" or "shapes" (the default for all others). A `Path` always means a directory.
        originals: keep the measured points. If False, the model generates all `round(ratio * N)`
            points.
        denoise: replace noisy points: `originals=False`, by default with the included model
            "noisy". Without a `model`, a shape with little noise is upsampled as without `denoise`.
        only_new: return the new points only.
        max_distance: largest distance of a new point to the nearest measured point. Where this
            leaves too little room, there are fewer points than `ratio` says.
        max_uncertainty: largest uncertainty of a new point. There may be fewer points, too.
        above_ground: the third coordinate is a height. No new point lies below the ground, and
            only new points on the ground get class 2. By default True for a cloud read from a
            scanner format, and for models with heights: "lidar", "forest", models fine-tuned from
            them, and others with the options `heights` or `column_layers`.
        ground_density: largest density of the new points on the ground below crowns, where no pulse
            came through, in points per unit of area; 0 for none. By default that of the ground
            where it is seen. Needs heights (`above_ground`).
        oversampling: candidates of a second pass for each point that is kept, 1 to 8; by default
            the value in the model's configuration. 1 is fast; 4 takes five to six times as long and
            fills more holes.
        classes: upsample only points of these classes, and copy the others.
        include_noise: upsample noise and withheld points, too.
        uncertainty: give a `PointCloud` the attribute `uncertainty`.
        seed: of the order in which candidates are compared; another one gives other new points
            that are as good.
        device: by default an accelerator if there is one, else the CPU.

    Raises FileError for a path, for coordinates that are not (N, 3), not finite, masked, complex,
    bools, or 1e12 and more; DataError for fewer than two distinct points to upsample, for an
    attribute of another length or of objects, and for `classes` if the cloud has no
    `classification`; ConfigError for invalid options, for a ratio together with a density, for a
    `ground_density` without heights, and for a device that can't be used; ModelError if the model
    can't be loaded.
    """
    given: Any = points
    is_cloud = isinstance(given, PointCloud)
    path = given.path if is_cloud else None
    if ratio is not None and density is not None:
        raise ConfigError("ratio and density: give one of them")
    options = UpsampleOptions(
        ratio=DEFAULT_RATIO if ratio is None else ratio,
        density=density,
        originals=originals and not denoise,
        max_distance=max_distance,
        max_uncertainty=max_uncertainty,
        ground_density=ground_density,
        oversampling=oversampling,
        uncertainty=uncertainty,
        seed=seed,
    )
    if not (classes is None or isinstance(classes, Iterable)):
        raise ConfigError(f"classes {classes!r:.40}: give a sequence of numbers, such as [2]")
    point_filter = PointFilter(
        classes=None if classes is None else tuple(classes), include_noise=include_noise
    )
    target_device = default_device() if device is None else _usable(device)
    loaded = load_model(shipped_for(path, denoise) if model is None else model, target_device)
    if above_ground is None:
        above_ground = has_heights(path, loaded.config)
    options = options.with_heights(bool(above_ground))
    # With its index: a thread starts on the first GPU, whichever is the current one here.
    target_device = next(loaded.parameters()).device
    cloud = given if is_cloud else PointCloud(given)
    cloud = replace(cloud, positions=np.array(as_float64(cloud.positions)))
    if cloud.positions.shape == (0, 3):
        raise DataError("points: has 0 points; at least 2 are needed, leave it out")
    check_positions(cloud.positions, "points")
    check_magnitudes(cloud.positions, "points")
    check_attributes(cloud, "points")
    with temporary_directory() as directory:
        try:
            store = build_survey_store(
                [[cloud]],
                directory,
                takes_part=point_filter,
                upright=options.is_upright(loaded.config),
            )
        except DataError as error:
            raise DataError(f"points: {error}") from None
        if denoise and model is None and has_little_noise(store, options):
            loaded, options = load_model("shapes", target_device), replace(options, originals=True)
        new_points = run_passes(store, loaded, options, SingleProcess(), target_device)
        parts: list[PointCloud] = list(new_points.of_file())
    has_originals = options.originals and not only_new
    if has_originals or not parts:
        kept = PointCloud(cloud.positions, cloud.attributes | _own_attributes(cloud, new_points))
        # An empty result has the attributes, too.
        parts.insert(0, kept if has_originals else kept.select(np.zeros(len(cloud), bool)))
    result: Any = replace(PointCloud.joined(parts), header=cloud.header, path=cloud.path)
    return result if is_cloud else result.positions


def _own_attributes(cloud: PointCloud, new_points: NewPoints) -> dict[str, np.ndarray]:
    """The attributes of `added_dimensions` for measured points: those of the cloud, or defaults.

    Text formats and NumPy read them in wider types than those that pointup writes.
    """
    own = {}
    for dimension in added_dimensions(cloud, new_points.has_uncertainty):
        name, dtype = dimension.name, np.dtype(dimension.dtype)
        if name in cloud.attributes:
            own[name] = cast_values(cloud.attributes[name], dtype, name)
        elif dimension.default == "index":
            own[name] = np.arange(len(cloud), dtype=dtype)
        else:
            own[name] = np.full(len(cloud), dimension.default, dtype)
    return own


def _usable(device: torch.device | str) -> torch.device:
    """A device that was asked for. Raises ConfigError if torch can't use it."""
    try:
        # torch looks for the device only when something is put on it.
        return torch.empty(0, device=device).device
    # AssertionError: of a torch that was built without this kind of device.
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")[:200]
        raise ConfigError(
            f"device {device}: can't be used ({reason}); leave it out, or choose device='cpu'"
        ) from error


def default_device() -> torch.device:
    """The accelerator if there is one, else the CPU."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def shipped_for(source: Path | None, denoise: bool = False) -> str:
    """Name of the included model for a file: "lidar" for formats of scanners, otherwise "shapes";
    to `denoise` "noisy"."""
    if denoise:
        return "noisy"
    return "lidar" if is_survey(source) else "shapes"


def is_survey(source: Path | None) -> bool:
    """Whether the third coordinate of a file is a height: True for the formats of scanners."""
    return source is not None and source.suffix.lower() in SCANNER_EXTENSIONS


def has_heights(source: Path | None, config: ModelConfig) -> bool:
    """Whether the third coordinate of a cloud is a height: by its file, or by its model.

    The configuration of the model decides, not its name: a directory, a copy in memory and a
    fine-tuned model are treated like the included model.
    """
    return is_survey(source) or config.has_heights


def load_model(model: Upsampler | str | Path, device: torch.device) -> Upsampler:
    """The model on `device`, in evaluation mode: itself if it is so already, a copy, or loaded by
    `Upsampler.from_pretrained`.

    Raises ModelError if the model can't be loaded.
    """
    if not isinstance(model, Upsampler):
        if isinstance(model, torch.nn.Module):
            # Its name would be its description, of thousands of characters.
            raise ModelError(f"model: a {type(model).__name__}; give the pointup.Upsampler in it")
        return Upsampler.from_pretrained(model).eval().to(device)
    is_ready = all(weights.device == device for weights in model.parameters())
    is_ready &= not any(module.training for module in model.modules())
    return model if is_ready else deepcopy(model).eval().to(device)
