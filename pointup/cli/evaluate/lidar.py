"""`pointup evaluate lidar`: measures a predicted survey against a reference of the same area."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pointup.cli.evaluate.output import (
    Output,
    Oversampling,
    describe_model,
    open_model,
)
from pointup.cli.input_files import File, Model, Picture, View
from pointup.errors import ConfigError, DataError
from pointup.option_help import optional

if TYPE_CHECKING:
    import numpy as np

    from pointup.evaluation.common_extent import Extent
    from pointup.evaluation.lidar import Survey, SurveyReference
    from pointup.io.length_unit import LengthUnit
    from pointup.model.upsampler import Upsampler

METHODS = ("prediction", "model")
GIVEN = ("reference", "prediction", "source", "second", "thin")
Rows = dict[str, dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class Lidar:
    """Evaluate a survey against a reference survey of the same area.

    Give --reference with --prediction, an upsampled survey; or with --source and --model, to
    upsample the source first; or give --thin or --passes, a survey to split into both. If there
    is a source, it is measured, too, and so are the no-network baselines. A survey is a file, or a
    virtual point cloud (.vpc) of several. Options that are lengths are in metres, and figures in
    the unit of the files.
    """

    reference: File = None
    """Reference survey, of the density that the prediction should have."""
    prediction: File = None
    """Upsampled survey to evaluate."""
    source: File = None
    """Sparse survey, before upsampling."""
    second: File = None
    """Second survey of the area, by the same kind of sensor as the reference. It is measured like a
    prediction, as the "resampled" ground truth: what another survey of that kind reaches."""
    thin: File = None
    """Survey to split, instead of --source and --reference: one in ratio + 1 of its points is the
    source, and the others are the reference."""
    passes: File = None
    """Survey flown in overlapping passes, to split: the sparsest pass is the source, the others
    are the reference. The next one, of the density of the source, is the "resampled" one."""
    pattern: Literal["random", "poisson", "scanline"] = "random"
    """Thinning pattern of the source of --thin: random, poisson (evenly spaced) or scanline
    (parallel lines)."""
    model: Model = None
    """Model to upsample the source with: included model, directory or Hub repository."""
    oversampling: Oversampling = None
    """Candidates of a second pass for each point that is kept, 1 to 8, as in `pointup upsample`. By
    default the model's own value."""
    ground_density: Annotated[float | None, optional("D")] = None
    """Largest density of the model's points on the ground below crowns, as in `pointup upsample`; 0
    for none. The midpoint baseline has none."""
    ratio: Annotated[float | None, optional("R")] = None
    """Upsampling ratio, 1 or more. By default 4 with --thin, else the density of the prediction or
    reference divided by that of the source."""
    density: Annotated[float | None, optional("D")] = None
    """Target density instead of a ratio, in points per square unit of the files."""
    metres_per_unit: Annotated[float | None, optional("LENGTH")] = None
    """Length in metres of the unit of the coordinates, such as 0.3048 for feet. By default that of
    the coordinate system in the files."""
    cell: float = 1.0
    """Side length in metres of the cells of the height and density grids."""
    thresholds: tuple[float, ...] = (0.1, 0.25, 0.5)
    """Distance thresholds of the F-score, in metres."""
    seed: int = 0
    """Seed of --thin, --passes and of the random baselines."""
    picture: Picture = None
    """Write a picture of the surveys beside each other: overview, cross-section, close-up, and maps
    of density and of the distance to the reference."""
    view: View = None
    """Write an HTML file to look at the surveys, coloured by their distance to the reference."""
    output: Output = field(default_factory=Output)

    def run(self) -> int:
        from pointup.cli.coordinate_systems import notes_on_systems
        from pointup.evaluation.cloud_metrics import ROWS
        from pointup.evaluation.common_extent import (
            common_extent,
            find_ground,
            notes_on_heights,
            notes_on_partial,
        )
        from pointup.evaluation.lidar import (
            SurveyReference,
            near_reference,
            read_survey,
            split_passes,
            thin_survey,
            upsampled_surveys,
        )
        from pointup.evaluation.lidar_metrics import Scale
        from pointup.io.virtual_clouds import files_of

        self._check()
        upsampler = open_model(self.model, self.oversampling)
        source: Survey | None = None
        second: Survey | None = None
        about: list[str] = []
        if self.passes is not None:
            source, reference, second, about = split_passes(self.passes, self.seed)
            read = [source]
        elif self.thin is not None:
            whole = read_survey(self.thin, synthetic="drop")
            source, reference = thin_survey(whole, self.ratio or 4.0, self.pattern, self.seed)
            read = [whole]
        else:
            assert self.reference is not None
            reference = read_survey(self.reference)
            source = None if self.source is None else read_survey(self.source)
            read = [reference, *([source] if source else [])]
        surveys: dict[str, np.ndarray] = {}
        beside = {}
        if self.prediction is not None:
            read.append(read_survey(self.prediction, synthetic="keep"))
            surveys["prediction"] = beside["prediction"] = read[-1].positions
        if self.second is not None:
            read.append(second := read_survey(self.second))
            beside["second survey"] = second.positions
        files = [file for survey in read for file in files_of(survey.path)]
        unit = self._unit(files)
        scale = Scale(unit, self.cell, self.thresholds)
        sides = {} if source is None else {"source": source.positions}
        sides["reference"] = reference.positions
        extent = common_extent(sides if source else {**sides, **surveys}, unit.of_metres(self.cell))
        notes = about + [f"note: {text}" for text in notes_on_systems(files)]
        notes += notes_on_partial(extent, beside)
        ratio = None
        if source is not None:
            like = surveys.get("prediction", reference.positions)
            ratio = self._ratio(source.positions, like, extent)
            notes += notes_on_heights(source.positions, reference.positions, extent, unit)
            near = near_reference(source, reference.positions)
            if near is not source:
                notes.append(
                    f"{source.path}: upsampled near the reference only, "
                    f"{len(near.positions):,} of {len(source.positions):,} points"
                )
            surveys |= upsampled_surveys(
                near, ratio, self.density, upsampler, self.seed, self.ground_density
            )
            surveys["source"] = source.positions
        if second is not None:
            surveys["resampled"] = second.positions
        ground = find_ground(reference.positions, extent, reference.classification, unit)
        measured = None if source is None else source.positions
        against = SurveyReference(reference.positions, extent, ground, measured, scale)
        rows = {name: against.measure(points) for name, points in surveys.items()}
        if source is not None:
            like = surveys.get("model", surveys["midpoints"])
            rows |= against.measure_fitted(near.positions, len(like), self.seed)
        rows = {name: rows[name] for name in ("prediction", *ROWS) if name in rows}
        self._report(rows, against, read, ratio, upsampler, notes)
        self._show(rows, against, surveys)
        return 0

    def _unit(self, files: Sequence[Path]) -> LengthUnit:
        from pointup.io.length_unit import common_unit, unit_of

        if self.metres_per_unit is not None:
            return unit_of(self.metres_per_unit)
        try:
            return common_unit(files)
        except DataError as error:
            raise DataError(f"{error}, or set --metres-per-unit") from None

    def _show(
        self, rows: Rows, against: SurveyReference, surveys: Mapping[str, np.ndarray]
    ) -> None:
        """Write columns and maps of the surveys, and a viewer, where asked for."""
        if self.picture is None and self.view is None:
            return
        from pointup.evaluation.pairs import ShownPair
        from pointup.visualization import maps_picture, save_picture, stacked
        from pointup.visualization.viewer import write_viewer

        # Beyond the common extent distances would measure the edge of the other survey.
        extent, known = against.extent, against.scale.unit
        clouds = {name: points[extent.contains(points)] for name, points in surveys.items()}
        reference = against.points[extent.contains(against.points)]
        unit = "" if known.metres is None else known.name
        notes = {name: f"Chamfer {rows[name]['chamfer']:.3g} {unit}".strip() for name in clouds}
        shown = ShownPair("", clouds, reference, True, unit, notes=notes, of="reference")
        if self.picture is not None:
            maps = maps_picture(shown.titled(), reference, unit=unit)
            save_picture(stacked([shown.picture(), maps]), self.picture)
        if self.view is not None:
            first = [name for name in ("source", "prediction", "model") if name in clouds]
            viewed = replace(shown, clouds={name: clouds[name] for name in first})
            write_viewer(self.view, [viewed.scene()], f"lidar against {self._reference_name()}")

    def _report(
        self,
        rows: Rows,
        against: SurveyReference,
        read: list[Survey],
        ratio: float | None,
        upsampler: Upsampler | None,
        notes: list[str],
    ) -> None:
        from pointup.evaluation.lidar_metrics import (
            beside_baselines,
            gap_closed,
            lidar_metrics,
            tables_of,
            worse_than_source,
        )
        from pointup.evaluation.report import EvaluationReport

        scale, extent, own = against.scale, against.extent, against.figures()
        unit: LengthUnit = scale.unit
        has_source = ratio is not None
        metrics = lidar_metrics(scale, against.ground.origin, has_source)
        heading = [
            f"lidar against {self._reference_name()}: {len(against.points):,} points, "
            f"{own['density']:.4g} points/{unit.name}2, gap fraction {own['gap_fraction']:.1f} %",
            f"common extent: {extent.area:,.0f} {unit.name}2 in cells of "
            f"{unit.described(scale.cell)}",
            f"unit: {unit.name}"
            if unit.metres is not None
            else "unit: unknown, no file names a coordinate system, taken for metres; set it with "
            "--metres-per-unit",
            *(note for survey in read for note in survey.notes),
            *notes,
        ]
        if ratio is not None:
            target = f"to {self.density:g} points/{unit.name}2" if self.density else f"{ratio:.3g}x"
            heading += [
                f"source {self._source_name()} upsampled {target}; measured points kept; no "
                f"network: midpoints, random midpoints, jitter, plane (seed {self.seed})",
                describe_model(self.model, upsampler),
            ]
        heading += [*beside_baselines(rows, METHODS), *gap_closed(rows, METHODS)]
        titled = {name.replace("_", " "): figures for name, figures in rows.items()}
        tables = tables_of("", metrics, titled, scale)
        report = EvaluationReport(heading, tables, worse_than_source(rows, metrics, METHODS))
        given = {name: getattr(self, name) for name in GIVEN}
        content = {
            "evaluation": "lidar",
            **{name: path and str(path) for name, path in given.items()},
            **({"passes": str(self.passes)} if self.passes else {}),
            "pattern": self.pattern if self.thin else None,
            "seed": self.seed,
            "model": self.model,
            "ratio": ratio,
            "unit": unit.name,
            "metres_per_unit": unit.metres,
            "area": extent.area,
            "cell": unit.of_metres(scale.cell),
            "ground": against.ground.origin,
            "reference_figures": own,
            "rows": rows,
            "remarks": report.remarks,
        }
        self.output.show(report, content)

    def _reference_name(self) -> str:
        if self.passes is not None:
            return f"the other flight passes of {self.passes}"
        if self.thin is None:
            return str(self.reference)
        return f"the points left out of the source of {self.thin}"

    def _source_name(self) -> str:
        if self.passes is not None:
            return f"a flight pass of {self.passes}"
        if self.thin is None:
            return str(self.source)
        return f"{self.thin}, thinned ({self.pattern}),"

    def _check(self) -> None:
        if self.passes is not None:
            if self.reference or self.source or self.prediction or self.second or self.thin:
                raise ConfigError(
                    "--passes splits one survey into source and reference; leave out --reference, "
                    "--source, --prediction, --second and --thin"
                )
        elif self.thin is not None:
            if self.reference or self.source or self.prediction:
                raise ConfigError(
                    "--thin splits one survey into source and reference; leave out --reference, "
                    "--source and --prediction"
                )
            if self.density is not None:
                raise ConfigError("--thin needs --ratio, not --density")
        elif self.reference is None:
            raise ConfigError("nothing to compare with: give --reference, or --thin")
        has_source = any((self.source, self.thin, self.passes))
        if self.model is not None and not has_source:
            raise ConfigError("--model needs --source to upsample")
        if self.prediction is None and not has_source:
            raise ConfigError("nothing to compare: give --prediction, or --source with --model")
        if self.prediction is not None and self.model is not None:
            raise ConfigError("--prediction and --model exclude each other; give one")
        if self.ratio is not None and self.density is not None:
            raise ConfigError("--ratio and --density exclude each other; give one")
        if not has_source and (self.ratio is not None or self.density is not None):
            raise ConfigError("--ratio and --density need --source to upsample")
        if self.ratio is not None and not 1 <= self.ratio < float("inf"):
            raise ConfigError(f"--ratio {self.ratio}: must be a finite number of at least 1")
        lengths = (self.metres_per_unit or 1.0, self.cell, self.density or 1.0, *self.thresholds)
        if not all(0 < length < float("inf") for length in lengths) or self.metres_per_unit == 0:
            raise ConfigError(
                "--metres-per-unit, --cell, --density and --thresholds must be greater than 0"
            )
        self.output.check(picture=self.picture, view=self.view)

    def _ratio(self, source: np.ndarray, like: np.ndarray, extent: Extent) -> float:
        if self.ratio is not None:
            return self.ratio
        if self.thin is not None:
            return 4.0
        num_source = int(extent.contains(source).sum())
        return max(1.0, int(extent.contains(like).sum()) / max(num_source, 1))
