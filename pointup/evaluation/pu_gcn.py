"""Evaluates sets of shapes by the PU-GCN protocol: CD, HD, P2F of model and baselines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from scipy.spatial import cKDTree
from torch import Tensor

from pointup.errors import ConfigError, DataError, FileError
from pointup.evaluation.baselines import generator_of
from pointup.evaluation.cloud_metrics import METRICS, Figures, Metric, measure
from pointup.geometry.midpoints import midpoint_upsample
from pointup.geometry.surfaces import Surface
from pointup.io.cloud import PointCloud
from pointup.io.files import mesh_extensions, point_extensions, read_mesh, read_points
from pointup.model.upsampler import Upsampler
from pointup.upsampling.in_memory import upsample
from pointup.upsampling.options import pass_ratios

Protocol = Literal["pu-gcn", "half"]

SUMMED = ("cd", "hd", "cd_target_frame")


@dataclass(frozen=True)
class Shape:
    """A shape to evaluate on. Clouds are (N, 3) float64; None is unknown.

    Attributes:
        name: of the file, without its extension.
        truth: the ground truth, a dense cloud.
        source: the sparse cloud to upsample.
        prediction: a cloud upsampled by another program.
        surface: the true surface, in the coordinates of the clouds.
        second: the resampled ground truth, a second sampling of the surface, independent of `truth`
            and of the same size.
        seed: number of the sampling, if the clouds were sampled from the surface.
    """

    name: str
    truth: np.ndarray
    source: np.ndarray | None = None
    prediction: np.ndarray | None = None
    surface: Surface | None = None
    second: np.ndarray | None = None
    seed: int = 0


def shape_metrics(protocol: Protocol, *, are_drawn: bool = False) -> dict[str, Metric]:
    """The metrics of `measure_shape` for a protocol, in the order to print.

    `are_drawn`: the clouds are those of `DrawnShapes`, whose meshes are scaled.
    """
    frame = "in units of the target's furthest distance from its mean"
    metrics = {name: METRICS[name] for name in ("cd", "hd", "p2f", "cd_target_frame")}
    metrics["hausdorff"] = Metric(
        "Hausdorff",
        "x1e-3",
        f"largest distance of any point of either cloud to the other; unsquared, {frame}",
    )
    if are_drawn:
        convention = (
            "mean distance of the prediction to the true surface; unsquared, each mesh scaled to "
            "furthest distance 1 from its centre"
        )
        metrics["p2f"] = replace(metrics["p2f"], convention=convention)
    metrics["spacing_cv"] = METRICS["spacing_cv"]
    if protocol == "half":
        for name in SUMMED:
            convention = metrics[name].convention + "; half of the sum (--protocol half)"
            metrics[name] = replace(metrics[name], convention=convention)
    return metrics


def measure_shape(prediction: np.ndarray, shape: Shape, protocol: Protocol) -> Figures:
    """Figures of a predicted cloud (P, 3), by the names of `shape_metrics`.

    With the protocol "pu-gcn" CD and HD are sums of both directions, as in most papers; with "half"
    they are half of it. The figure "p2f" needs the surface of the shape. Raises DataError if all
    points of the truth are in one place, and for an empty prediction.
    """
    centre = shape.truth.mean(axis=0)
    radius = np.linalg.norm(shape.truth - centre, axis=1).max()
    if not radius > 0:
        raise DataError(f"{shape.name}: all points of the truth are in one place; leave it out")
    if not len(prediction):
        raise DataError(f"{shape.name}: the prediction has no points")
    # Normalised before float32: a shape far from the origin would lose its details.
    clouds = [_pack((points - centre) / radius) for points in (prediction, shape.truth)]
    figures = measure(*clouds[0], *clouds[1])[0]
    chosen = {name: figures[name] for name in ("cd", "hd")}
    if shape.surface is not None:
        chosen["p2f"] = 1e3 * float(shape.surface.distance(prediction).mean())
    chosen |= {
        "cd_target_frame": figures["cd_target_frame"],
        "hausdorff": 1e3 * figures["hausdorff"],
        "spacing_cv": figures["spacing_cv"],
    }
    if protocol == "half":
        chosen |= {name: 0.5 * chosen[name] for name in SUMMED}
    return chosen


def evaluate_shape(
    shape: Shape,
    upsampler: Upsampler | None,
    protocol: Protocol = "pu-gcn",
    denoise: bool = False,
    made: list[PointCloud] | None = None,
) -> dict[str, Figures]:
    """Figures of the clouds of `clouds_of_shape`, by row; `made` as there."""
    return {
        row: measure_shape(points, shape, protocol)
        for row, points in clouds_of_shape(shape, upsampler, denoise, made).items()
    }


def clouds_of_shape(
    shape: Shape,
    upsampler: Upsampler | None,
    denoise: bool = False,
    made: list[PointCloud] | None = None,
) -> dict[str, np.ndarray]:
    """Clouds (N, 3) of the rows "model", "prediction", "midpoints" (no network) and "resampled".

    Rows whose cloud is not available are left out. The ratio is that of the truth to the source.
    The midpoint baseline upsamples in the passes of `pass_ratios`: 16x is 4x twice, as in the
    PU-GCN protocol; a model in those that its `max_pass_ratio` allows. The cloud of the model is
    the output of `pointup upsample`, or with `denoise` of `pointup upsample --denoise`; `made` gets
    it with its attributes.
    """
    clouds: dict[str, np.ndarray | None] = {"prediction": shape.prediction}
    if shape.source is not None:
        ratio = len(shape.truth) / len(shape.source)
        if ratio < 1:
            raise DataError(
                f"{shape.name}: the input has {len(shape.source)} points, the truth only "
                f"{len(shape.truth)}; are the folders swapped?"
            )
        clouds["midpoints"] = midpoints_of_shape(shape.source, ratio)
        if upsampler is not None:
            source, device = PointCloud(shape.source), next(upsampler.parameters()).device
            cloud = upsample(source, ratio, model=upsampler, device=device, originals=not denoise)
            clouds = {"model": cloud.positions, **clouds}
            if made is not None:
                made.append(cloud)
    clouds["resampled"] = shape.second
    return {row: points for row, points in clouds.items() if points is not None}


def midpoints_of_shape(source: np.ndarray, ratio: float) -> np.ndarray:
    """`midpoint_upsample` of a cloud (N, 3), in the passes of `pass_ratios`."""
    centre = source.mean(axis=0)
    pos, ptr = _pack(source - centre)
    for reached in np.cumprod(pass_ratios(ratio)).tolist():
        pos, ptr = midpoint_upsample(pos, ptr, round(len(source) * reached) / len(pos))
    return pos.double().numpy() + centre


def _pack(points: np.ndarray) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(points.astype(np.float32)), torch.tensor([0, len(points)])


Pattern = Literal["poisson", "random"]

# Largest mean distance of the truth from its mesh, as a share of its radius. A larger one means
# different coordinates.
LARGEST_OFFSET = 0.05
# A cloud is in another frame than its truth if its centre or its radius differs by more than
# `FRAME_OFFSET` of the truth's radius, and its points also lie farther than `OFF_TRUTH` of it from
# the truth: an uneven density moves the centre alone, and noise moves only the points.
FRAME_OFFSET, OFF_TRUTH = 0.05, 0.02


def files_of_shapes(folder: Path, extensions: Sequence[str]) -> dict[str, Path]:
    """The files of a folder with these extensions, by file name without extension, sorted.

    Raises FileError if there are none, ConfigError if two have the same name.
    """
    if not folder.is_dir():
        problem = "is a file; name its folder" if folder.exists() else "no such folder"
        raise FileError(f"{folder}: {problem}")
    files: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        # macOS leaves files such as ._a.xyz beside a.xyz on disks of other systems.
        if path.name.startswith("."):
            continue
        if path.suffix.lower() in extensions and path.is_file():
            if path.stem in files:
                raise ConfigError(
                    f"{path}: there is also {files[path.stem].name}; keep one file of each shape"
                )
            files[path.stem] = path
    if not files:
        raise FileError(f"{folder}: no files of shapes in it ({' '.join(extensions)})")
    return files


class StoredShapes:
    """Shapes from folders, matched by file name. With a mesh, the truth is also resampled.

    `without_truth`: files of the inputs and predictions whose name no truth has, by folder.
    Some meshes may be missing, as in the published test sets. Iteration reads the shapes one by
    one. The constructor raises FileError or ConfigError if a folder is missing, lacks a shape of
    the truth folder, or has no mesh of any. Iteration raises FileError and DataError for invalid
    files.
    """

    def __init__(
        self,
        truth: Path,
        inputs: Path | None = None,
        predictions: Path | None = None,
        meshes: Path | None = None,
    ) -> None:
        self.truths = files_of_shapes(truth, point_extensions)
        self.without_truth: dict[Path, list[Path]] = {}
        self.inputs = self._beside(inputs, point_extensions)
        self.predictions = self._beside(predictions, point_extensions)
        self.meshes = self._beside(meshes, mesh_extensions, each=False)

    def _beside(
        self, folder: Path | None, extensions: Sequence[str], each: bool = True
    ) -> dict[str, Path]:
        """The files of a folder by the name of their shape: of `each` shape, or of some."""
        if folder is None:
            return {}
        files = files_of_shapes(folder, extensions)
        missing = [name for name in self.truths if name not in files]
        if missing and (each or len(missing) == len(self.truths)):
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise FileError(
                f"{folder}: no file named {missing[0]}{more}; every truth needs its counterpart, "
                f"with the same name but for the extension: add that of {self.truths[missing[0]]}, "
                "or move this file to another folder if it is no truth"
            )
        without_truth = [path for name, path in files.items() if name not in self.truths]
        if each and without_truth:
            self.without_truth[folder] = without_truth
        return files

    def __len__(self) -> int:
        return len(self.truths)

    def check_files(self) -> None:
        """Read all files; raises FileError for the first that can't be read."""
        for name, truth in self.truths.items():
            clouds = truth, self.inputs.get(name), self.predictions.get(name)
            for path in filter(None, clouds):
                _read(path)
            if name in self.meshes:
                read_mesh(self.meshes[name])

    def __iter__(self) -> Iterator[Shape]:
        for name, path in self.truths.items():
            shape = Shape(
                name,
                _read(path),
                source=_read(self.inputs[name]) if self.inputs else None,
                prediction=_read(self.predictions[name]) if self.predictions else None,
            )
            if name in self.meshes:
                surface = read_mesh(self.meshes[name])
                _check_same_place(shape, surface, self.meshes[name])
                second, _ = surface.poisson_disk(len(shape.truth), generator_of(0, name, "second"))
                shape = replace(shape, surface=surface, second=second)
            yield shape


@dataclass(frozen=True, kw_only=True)
class DrawnShapes:
    """Shapes sampled from meshes: source, truth and second sampling are independent.

    As in the PU-GCN protocol, the truth and the second sampling are Poisson-disk samplings of
    round(ratio * num_source) points. The source has `num_source` points, Poisson-disk or random by
    `pattern`. A mesh is first centred on its bounding box and scaled to furthest distance 1. The
    samplings depend only on the name of the file and the number of the sampling, and the truth does
    not depend on the pattern. `noise` is the standard deviation of Gaussian noise on the source, as
    a share of that distance.
    """

    meshes: Path
    num_source: int = 2048
    ratio: float = 4.0
    num_seeds: int = 1
    pattern: Pattern = "poisson"
    noise: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.noise < 1:
            raise ConfigError(f"noise {self.noise}: must lie in [0, 1)")
        if self.num_source < 2 or self.num_seeds < 1:
            raise ConfigError(
                f"{self.num_source} points and {self.num_seeds} samplings: at least 2 and 1 needed"
            )
        if not (np.isfinite(self.ratio) and self.ratio >= 1):
            raise ConfigError(f"ratio {self.ratio}: must be a finite number of at least 1")

    def __len__(self) -> int:
        return self.num_seeds * len(files_of_shapes(self.meshes, mesh_extensions))

    def check_files(self) -> None:
        """Read all files; raises FileError for the first that can't be read."""
        for path in files_of_shapes(self.meshes, mesh_extensions).values():
            read_mesh(path)

    def __iter__(self) -> Iterator[Shape]:
        num_truth = round(self.ratio * self.num_source)
        for name, path in files_of_shapes(self.meshes, mesh_extensions).items():
            surface = read_mesh(path).normalized()
            for seed in range(self.num_seeds):
                draw = surface.poisson_disk if self.pattern == "poisson" else surface.sample
                source = draw(self.num_source, generator_of(seed, name, self.pattern))[0]
                if self.noise:
                    random = generator_of(seed, name, "noise")
                    source = source + self.noise * random.standard_normal(source.shape)
                yield Shape(
                    name,
                    truth=surface.poisson_disk(num_truth, generator_of(seed, name, "truth"))[0],
                    source=source,
                    second=surface.poisson_disk(num_truth, generator_of(seed, name, "second"))[0],
                    surface=surface,
                    seed=seed,
                )


def is_subset(shape: Shape) -> bool:
    """Whether nearly all points of the source are points of the truth, up to rounding in files."""
    if shape.source is None:
        return False
    distance, _ = cKDTree(shape.truth).query(shape.source)
    rounding = 1e-5 * np.abs(shape.truth - shape.truth.mean(axis=0)).max()
    return bool(np.mean(distance <= rounding) > 0.9)


def in_another_frame(points: np.ndarray, truth: np.ndarray) -> bool:
    """Whether a cloud (N, 3) is moved or scaled against its truth (M, 3), as by a normalisation.

    Centre and radius are the mean and the root mean square distance to it, which depend little on
    noise. They may differ by three times what random points of these numbers do.
    """
    centres = [cloud.mean(axis=0) for cloud in (points, truth)]
    spread, true_spread = (
        np.sqrt(np.square(cloud - centre).sum(axis=1).mean())
        for cloud, centre in zip((points, truth), centres, strict=True)
    )
    radius = np.linalg.norm(truth - centres[1], axis=1).max()
    by_chance = 3 * true_spread * np.sqrt(1 / len(points) + 1 / len(truth))
    moved = np.linalg.norm(centres[0] - centres[1])
    scaled = radius * abs(spread / true_spread - 1)
    if max(moved, scaled) <= max(FRAME_OFFSET * radius, by_chance):
        return False
    distance, _ = cKDTree(truth).query(points)
    return bool(np.median(distance) > OFF_TRUTH * radius)


def _read(path: Path) -> np.ndarray:
    return read_points(path, attributes=False).positions


def _check_same_place(shape: Shape, surface: Surface, path: Path) -> None:
    spread = np.linalg.norm(shape.truth - shape.truth.mean(axis=0), axis=1).max()
    offset = surface.distance(shape.truth).mean()
    if offset > LARGEST_OFFSET * spread:
        raise DataError(
            f"{path}: the truth is {offset:.3g} away from this mesh, on average; P2F needs clouds "
            "and meshes in the same coordinates (leave out --meshes to go without)"
        )
