"""`pointup evaluate lidar`: a predicted survey against a reference survey of the same ground."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from pointup.apps.evaluate_output import (
    File,
    Model,
    Output,
    Oversampling,
    describe_upsampling,
    open_model,
)
from pointup.errors import ConfigError, DataError, FileError

if TYPE_CHECKING:
    import numpy as np

    from pointup.evaluation.lidar import Extent
    from pointup.model import Upsampler

PICTURES = (".png", ".jpg", ".jpeg")


@dataclass(frozen=True, kw_only=True)
class Lidar:
    """On a survey, against a reference survey of the same ground, in metres.

    Give --prediction, upsampled before, or --source with --model to upsample it now. The raw source
    and the no-network baseline come beside where there is a --source.
    """

    reference: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    """Reference survey, as dense as the prediction should be."""
    prediction: File = None
    """Upsampled survey."""
    source: File = None
    """The survey before upsampling."""
    model: Model = None
    """Model that upsamples the source."""
    oversampling: Oversampling = None
    """As of `pointup upsample`: points drafted for each one that the model keeps."""
    ratio: float | None = None
    """Upsampling ratio; by default that of the prediction's or else the reference's density to the
    source's."""
    density: float | None = None
    """Points per m2 to upsample to, in place of a ratio."""
    metres_per_unit: float = 1.0
    """Length in metres of the files' unit of coordinates (feet: 0.3048)."""
    cell: float = 1.0
    """Side in metres of the cells of the height and density grids."""
    thresholds: tuple[float, ...] = (0.1, 0.25, 0.5)
    """Distances in metres for the F-score."""
    picture: Annotated[Path | None, tyro.conf.arg(metavar="FILE.png")] = None
    """Draw maps of the point density to this file."""
    output: Output = field(default_factory=Output)

    def run(self) -> int:
        from pointup.evaluation.lidar import common_extent, lidar_metrics, measure_survey
        from pointup.evaluation.report import Report, Table
        from pointup.model import Upsampler

        self._check()
        upsampler = open_model(self.model, self.oversampling)
        reference = self._read(self.reference)
        surveys: dict[str, np.ndarray] = {}
        if self.prediction is not None:
            surveys["prediction"] = self._read(self.prediction)
        if self.source is not None:
            source = self._read(self.source)
            extent = common_extent({"source": source, "reference": reference}, self.cell)
            ratio = self._ratio(source, surveys.get("prediction", reference), extent)
            if upsampler is not None:
                surveys["model"] = self._upsample(source, ratio, upsampler)
            # Before training, the model moves no point away from the midpoints and, without quotas,
            # prefers no place.
            surveys["midpoints"] = self._upsample(source, ratio, Upsampler(quota_trust=0.0))
            surveys["source"] = source
        else:
            extent = common_extent({"reference": reference, **surveys}, self.cell)
        metrics = lidar_metrics(self.cell, self.thresholds)
        rows = {
            name: measure_survey(survey, reference, extent, self.thresholds)
            for name, survey in surveys.items()
        }
        heading = [
            f"lidar against {self.reference}: {len(reference):,} points, "
            f"{extent.contains(reference).sum() / extent.area:.4g} points/m2",
            f"common ground: {extent.area:,.0f} m2 in cells of {self.cell:g} m",
        ]
        if self.source is not None:
            wish = f"to {self.density:g} points/m2" if self.density else f"{ratio:.3g}x"
            heading += [
                f"source {self.source} upsampled {wish}; midpoints: no network",
                describe_upsampling(self.model, upsampler),
            ]
        report = Report(heading, [Table("", metrics, rows, metrics_down=True)])
        content = {
            "evaluation": "lidar",
            "reference": str(self.reference),
            "prediction": self.prediction and str(self.prediction),
            "source": self.source and str(self.source),
            "model": self.model,
            "area": extent.area,
            "cell": self.cell,
            "rows": rows,
        }
        self.output.show(report, content, metrics)
        if self.picture is not None:
            from pointup.evaluation.density import density_picture
            from pointup.pictures import save_picture

            picture = density_picture({**surveys, "reference": reference}, extent)
            save_picture(picture, self.picture)
        return 0

    def _check(self) -> None:
        if self.model is not None and self.source is None:
            raise ConfigError("--model needs --source to upsample")
        if self.prediction is None and self.source is None:
            raise ConfigError("nothing to compare: give --prediction, or --source with --model")
        if self.prediction is not None and self.model is not None:
            raise ConfigError("--prediction and --model exclude each other; give one")
        if self.ratio is not None and self.density is not None:
            raise ConfigError("--ratio and --density exclude each other; give one")
        if self.source is None and (self.ratio is not None or self.density is not None):
            raise ConfigError("--ratio and --density need --source to upsample")
        if self.ratio is not None and not 1 <= self.ratio < float("inf"):
            raise ConfigError(f"--ratio {self.ratio}: must be a finite number of at least 1")
        lengths = (self.metres_per_unit, self.cell, self.density or 1.0, *self.thresholds)
        if not all(0 < length < float("inf") for length in lengths):
            raise ConfigError(
                "--metres-per-unit, --cell, --density and --thresholds must be greater than 0"
            )
        if self.picture is not None and self.picture.suffix.lower() not in PICTURES:
            raise FileError(f"{self.picture}: pictures are written as {' or '.join(PICTURES)}")
        self.output.check(self.picture)

    def _read(self, path: Path) -> np.ndarray:
        from pointup.data.files import read_points

        return read_points(path, attributes=False).positions * self.metres_per_unit

    def _upsample(self, source: np.ndarray, ratio: float, upsampler: Upsampler) -> np.ndarray:
        from pointup.upsampling import upsample

        try:
            return upsample(source, ratio, density=self.density, model=upsampler)
        except DataError as error:
            raise DataError(f"{self.source}: {error}") from None

    def _ratio(self, source: np.ndarray, like: np.ndarray, extent: Extent) -> float:
        if self.ratio is not None:
            return self.ratio
        num_source = int(extent.contains(source).sum())
        return max(1.0, int(extent.contains(like).sum()) / max(num_source, 1))
