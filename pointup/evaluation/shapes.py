"""The field's evaluation on shapes: CD, HD and P2F of a model beside its baseline and its floor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from pointup.data.files import mesh_extensions, point_extensions, read_mesh, read_points
from pointup.errors import ConfigError, DataError, FileError
from pointup.evaluation.measures import METRICS, Metric, measure
from pointup.geometry.midpoints import midpoint_upsample
from pointup.geometry.surfaces import Surface
from pointup.model import Upsampler

Protocol = Literal["field", "half"]
Pattern = Literal["poisson", "random"]
Figures = dict[str, float]

# Of the truth's furthest distance: beyond it, mesh and truth can't be in the same coordinates.
LARGEST_OFFSET = 0.05
SUMMED = ("cd", "hd", "cd_shared")


@dataclass(frozen=True)
class Shape:
    """A true cloud and what is known of where it came from; clouds are (N, 3) float64.

    Attributes:
        name: of the file, without its extension.
        truth: what the source should become.
        source: the sparse cloud.
        prediction: an upsampled cloud that was made elsewhere.
        surface: the true surface, in the coordinates of the clouds.
        second: another sampling of the surface, independent of `truth` and as large: the floor.
        seed: number of the sampling, where the clouds were drawn from the surface.
    """

    name: str
    truth: np.ndarray
    source: np.ndarray | None = None
    prediction: np.ndarray | None = None
    surface: Surface | None = None
    second: np.ndarray | None = None
    seed: int = 0


def shape_metrics(protocol: Protocol) -> dict[str, Metric]:
    """What `measure_shape` gives, in the order to print, for this protocol."""
    frame = "both clouds in units of the truth's furthest distance from its mean"
    metrics = {name: METRICS[name] for name in ("cd", "hd", "p2f", "cd_shared")}
    metrics["hausdorff"] = Metric(
        "Hausdorff",
        "x1e-3",
        f"largest distance of any point of either cloud to the other; plain, {frame}",
    )
    metrics["uniformity"] = METRICS["uniformity"]
    if protocol == "half":
        for name in SUMMED:
            convention = metrics[name].convention + "; half of the sum (--protocol half)"
            metrics[name] = replace(metrics[name], convention=convention)
    return metrics


def measure_shape(prediction: np.ndarray, shape: Shape, protocol: Protocol) -> Figures:
    """Figures of a predicted cloud (P, 3), by the names of `shape_metrics`.

    The protocol "field" is that of the PU-GCN family: CD and HD are sums of both directions;
    "half" is the other one in use, the mean of both directions. "p2f" is there where the shape has
    its surface. Raises DataError for a truth without extent and for an empty prediction.
    """
    centre = shape.truth.mean(axis=0)
    radius = np.linalg.norm(shape.truth - centre, axis=1).max()
    if not radius > 0:
        raise DataError(f"{shape.name}: all points of the truth are in one place; leave it out")
    if not len(prediction):
        raise DataError(f"{shape.name}: the prediction has no points")
    # Before float32, or a shape far from the origin would lose its details.
    clouds = [_pack((points - centre) / radius) for points in (prediction, shape.truth)]
    figures = measure(*clouds[0], *clouds[1])[0]
    chosen = {name: figures[name] for name in ("cd", "hd")}
    if shape.surface is not None:
        chosen["p2f"] = 1e3 * float(shape.surface.distance(prediction).mean())
    chosen |= {
        "cd_shared": figures["cd_shared"],
        "hausdorff": 1e3 * figures["hausdorff"],
        "uniformity": figures["uniformity"],
    }
    if protocol == "half":
        chosen |= {name: 0.5 * chosen[name] for name in SUMMED}
    return chosen


def evaluate_shape(
    shape: Shape,
    upsampler: Upsampler | None,
    protocol: Protocol = "field",
    passes: int | None = None,
) -> dict[str, Figures]:
    """Figures of what there is: "model", "prediction", "midpoints" (no network) and "floor".

    The ratio is that of the truth to the source. Model and midpoints upsample the whole cloud, in
    `passes` of equal ratio, by default as many as `field_passes` says.
    """
    clouds: dict[str, np.ndarray | None] = {}
    if shape.source is not None:
        ratio = len(shape.truth) / len(shape.source)
        if ratio < 1:
            raise DataError(
                f"{shape.name}: the input has {len(shape.source)} points, the truth only "
                f"{len(shape.truth)}; are the folders swapped?"
            )
        passes = passes or field_passes(ratio)
        if upsampler is not None:
            clouds["model"] = upsample_whole(shape.source, ratio, upsampler, passes)
    clouds["prediction"] = shape.prediction
    if shape.source is not None:
        clouds["midpoints"] = upsample_whole(shape.source, ratio, None)
    clouds["floor"] = shape.second
    return {
        row: measure_shape(points, shape, protocol)
        for row, points in clouds.items()
        if points is not None
    }


def field_passes(ratio: float) -> int:
    """In how many passes the field upsamples: none by more than 4, so that 16x is 4x twice."""
    return max(1, math.ceil(math.log(ratio, 4) - 1e-9))


@torch.no_grad()
def upsample_whole(
    source: np.ndarray, ratio: float, upsampler: Upsampler | None, passes: int = 1
) -> np.ndarray:
    """Upsample a cloud (N, 3) as one piece, by the model or, without one, by midpoints."""
    centre = source.mean(axis=0)
    device = next(upsampler.parameters()).device if upsampler is not None else "cpu"
    pos, ptr = (tensor.to(device) for tensor in _pack(source - centre))
    for done in range(1, passes + 1):
        num_points = round(len(source) * ratio ** (done / passes))
        upsample = midpoint_upsample if upsampler is None else upsampler
        pos, ptr, *_ = upsample(pos, ptr, num_points / len(pos))
    return pos.double().cpu().numpy() + centre


def mean_over_shapes(
    records: Sequence[tuple[Shape, Mapping[str, Figures]]],
) -> dict[str, Figures]:
    """Mean of every figure of every row over the shapes that have it."""
    rows = dict.fromkeys(row for _, figures in records for row in figures)
    return {row: mean_figures([f[row] for _, f in records if row in f]) for row in rows}


def mean_figures(figures: Sequence[Figures]) -> Figures:
    """Mean of every figure over those that have it, in float64."""
    names = dict.fromkeys(name for one in figures for name in one)
    return {name: float(np.mean([one[name] for one in figures if name in one])) for name in names}


def files_of_shapes(folder: Path, extensions: Sequence[str]) -> dict[str, Path]:
    """The files of a folder with these extensions, by their names without it, sorted.

    Raises FileError when there are none, ConfigError when two have the same name.
    """
    if not folder.is_dir():
        raise FileError(f"{folder}: no such folder")
    files: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
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
    """Shapes from folders, joined by file name; the floor is drawn where there are meshes.

    Iterating reads them one by one. Raises FileError or ConfigError at once when a folder is
    missing or lacks a shape of the truth's, FileError and DataError later for what is in a file.
    """

    def __init__(
        self,
        truth: Path,
        inputs: Path | None = None,
        predictions: Path | None = None,
        meshes: Path | None = None,
    ) -> None:
        self.truths = files_of_shapes(truth, point_extensions)
        self.inputs = self._beside(inputs, point_extensions)
        self.predictions = self._beside(predictions, point_extensions)
        self.meshes = self._beside(meshes, mesh_extensions)

    def _beside(self, folder: Path | None, extensions: Sequence[str]) -> dict[str, Path]:
        if folder is None:
            return {}
        files = files_of_shapes(folder, extensions)
        missing = [name for name in self.truths if name not in files]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise FileError(
                f"{folder}: no file named {missing[0]}{more}; every truth needs its counterpart, "
                "with the same name but for the extension"
            )
        return files

    def __len__(self) -> int:
        return len(self.truths)

    def __iter__(self) -> Iterator[Shape]:
        for name, path in self.truths.items():
            shape = Shape(
                name,
                _read(path),
                source=_read(self.inputs[name]) if self.inputs else None,
                prediction=_read(self.predictions[name]) if self.predictions else None,
            )
            if self.meshes:
                surface = read_mesh(self.meshes[name])
                _check_same_place(shape, surface, self.meshes[name])
                second, _ = surface.poisson_disk(len(shape.truth), _generator(name, 0, "second"))
                shape = replace(shape, surface=surface, second=second)
            yield shape


@dataclass(frozen=True, kw_only=True)
class DrawnShapes:
    """Shapes drawn from meshes: source, truth and second sampling independent of one another.

    The field's protocol: the truth and the second sampling are Poisson-disk samplings of
    round(ratio * num_source) points, the source one of `num_source` points, or random points of
    the surface by `pattern`. A mesh is first centred on its bounding box and scaled to furthest
    distance 1. What is drawn depends on the file's name and the number of the sampling alone; the
    same truth goes with each pattern.
    """

    meshes: Path
    num_source: int = 2048
    ratio: float = 4.0
    num_seeds: int = 1
    pattern: Pattern = "poisson"

    def __post_init__(self) -> None:
        if self.num_source < 2 or self.num_seeds < 1:
            raise ConfigError(
                f"{self.num_source} points and {self.num_seeds} samplings: at least 2 and 1 needed"
            )
        if not (np.isfinite(self.ratio) and self.ratio >= 1):
            raise ConfigError(f"ratio {self.ratio}: must be a finite number of at least 1")

    def __len__(self) -> int:
        return self.num_seeds * len(files_of_shapes(self.meshes, mesh_extensions))

    def __iter__(self) -> Iterator[Shape]:
        num_truth = round(self.ratio * self.num_source)
        for name, path in files_of_shapes(self.meshes, mesh_extensions).items():
            surface = read_mesh(path).normalized()
            for seed in range(self.num_seeds):
                draw = surface.poisson_disk if self.pattern == "poisson" else surface.sample
                yield Shape(
                    name,
                    truth=surface.poisson_disk(num_truth, _generator(name, seed, "truth"))[0],
                    source=draw(self.num_source, _generator(name, seed, self.pattern))[0],
                    second=surface.poisson_disk(num_truth, _generator(name, seed, "second"))[0],
                    surface=surface,
                    seed=seed,
                )


def _read(path: Path) -> np.ndarray:
    return read_points(path, attributes=False).positions


def _generator(name: str, seed: int, part: str) -> np.random.Generator:
    return np.random.default_rng([seed, crc32(name.encode()), crc32(part.encode())])


def _pack(points: np.ndarray) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(points.astype(np.float32)), torch.tensor([0, len(points)])


def _check_same_place(shape: Shape, surface: Surface, path: Path) -> None:
    spread = np.linalg.norm(shape.truth - shape.truth.mean(axis=0), axis=1).max()
    offset = surface.distance(shape.truth).mean()
    if offset > LARGEST_OFFSET * spread:
        raise DataError(
            f"{path}: the truth is {offset:.3g} away from this mesh, on average; P2F needs clouds "
            "and meshes in the same coordinates (leave out --meshes to go without)"
        )
