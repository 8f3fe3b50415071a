"""`pointup evaluate lidar`: measures a predicted survey against a reference of the same area."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from pointup.cli.coordinate_systems import notes_on_systems
from pointup.cli.evaluate import Lidar
from pointup.cli.evaluate.output import check_outputs, describe_model, open_model, show_report
from pointup.errors import ConfigError, DataError
from pointup.evaluation.cloud_metrics import ROWS, Figures
from pointup.evaluation.common_extent import (
    Extent,
    common_extent,
    find_ground,
    note_on_cells,
    notes_on_heights,
    notes_on_partial,
)
from pointup.evaluation.lidar import (
    ATTRIBUTES,
    SurveyReference,
    near_reference,
    read_survey,
    split_passes,
    thin_survey,
    upsampled_surveys,
)
from pointup.evaluation.lidar_metrics import (
    Scale,
    beside_baselines,
    gap_closed,
    lidar_metrics,
    tables_of,
    worse_than_source,
)
from pointup.evaluation.pairs import ShownPair
from pointup.evaluation.rasters import write_rasters
from pointup.evaluation.report import EvaluationReport
from pointup.evaluation.uncertainty import (
    Reliability,
    describe_reliability,
    measured_uncertainty,
    reliability,
)
from pointup.io.cloud import CLASSIFICATION, PointCloud
from pointup.io.length_unit import LengthUnit, common_unit, named_system, unit_of
from pointup.io.virtual_clouds import files_of
from pointup.model.upsampler import Upsampler
from pointup.upsampling.attributes import UNCERTAINTY
from pointup.visualization.columns import maps_picture
from pointup.visualization.page import reliability_picture, save_picture, stacked
from pointup.visualization.viewer.document import write_viewer

METHODS = ("prediction", "model")
GIVEN = ("reference", "prediction", "source", "second", "thin")
OPTIONS = (*GIVEN, "passes", "model", "ratio", "density", "metres_per_unit")


def evaluate(options: Lidar) -> int:
    """Measure the surveys, and write the report. Returns the exit status."""
    check(options)
    upsampler = open_model(options.model, options.oversampling)
    source: PointCloud | None = None
    second: PointCloud | None = None
    notes: list[str] = []
    if options.passes is not None:
        source, reference, second = split_passes(options.passes, options.seed, notes)
    elif options.thin is not None:
        whole = read_survey(options.thin, notes, synthetic="drop")
        source, reference = thin_survey(whole, options.ratio or 4.0, options.pattern, options.seed)
        if copies := len(whole) - len(source) - len(reference):
            notes.append(f"{options.thin}: {copies:,} points left out: where another one is")
    else:
        assert options.reference is not None
        reference = read_survey(options.reference, notes)
        source = None if options.source is None else read_survey(options.source, notes)
    surveys: dict[str, np.ndarray] = {}
    made: dict[str, PointCloud] = {}
    beside = {}
    if options.prediction is not None:
        kept = ATTRIBUTES | {UNCERTAINTY: np.float32}
        made["prediction"] = read_survey(options.prediction, notes, "keep", kept)
        surveys["prediction"] = beside["prediction"] = made["prediction"].positions
    if options.second is not None:
        second = read_survey(options.second, notes)
        beside["second survey"] = second.positions
    names = "passes", "thin", "reference", "source", "prediction", "second"
    paths = [path for name in names if (path := getattr(options, name)) is not None]
    files = [file for path in paths for file in files_of(path)]
    unit = unit_of_files(options, files)
    scale = Scale(unit, options.cell, options.thresholds)
    sides = {} if source is None else {"source": source.positions}
    sides["reference"] = reference.positions
    clouds = {**sides, **surveys}
    compared = clouds if source is None else sides
    extent = common_extent(compared, unit.of_metres(options.cell))
    notes += note_on_cells(extent, compared)
    notes += [f"note: {text}" for text in notes_on_systems(files)]
    notes += notes_on_partial(extent, beside)
    ratio = None
    if source is not None:
        ratio = ratio_for(options, clouds, extent, notes)
        if options.thin is None:  # Else both are of one file.
            notes += notes_on_heights(source.positions, reference.positions, extent, unit)
        near = near_reference(source, reference.positions)
        if near is not source:
            notes.append(
                f"{source.path}: upsampled near the reference only, "
                f"{len(near.positions):,} of {len(source.positions):,} points"
            )
        surveys |= upsampled_surveys(
            near, ratio, options.density, upsampler, options.seed, options.ground_density, made
        )
        surveys["source"] = source.positions
    if second is not None:
        surveys["resampled"] = second.positions
    classes = reference.attributes.get(CLASSIFICATION)
    ground = find_ground(reference.positions, extent, classes, unit)
    measured = None if source is None else source.positions
    against = SurveyReference(reference.positions, extent, ground, measured, scale)
    rows = {name: against.measure(points) for name, points in surveys.items()}
    if source is not None:
        like = surveys.get("model", surveys["midpoints"])
        rows |= against.measure_fitted(near.positions, len(like), options.seed)
    rows = {name: rows[name] for name in ("prediction", *ROWS) if name in rows}
    inside = [cloud.select(extent.contains(cloud.positions)) for cloud in made.values()]
    around = None if measured is None else measured[extent.contains(measured)]
    found = reliability(
        [
            measured_uncertainty(cloud, against.points, source=around)
            for cloud in inside
            # Of new points alone nothing tells what the sampling of the reference adds.
            if around is not None or (cloud.attributes.get(UNCERTAINTY, np.zeros(1)) == 0).any()
        ]
    )
    report(options, rows, against, ratio, upsampler, notes, found)
    if options.picture is not None or options.view is not None:
        show(options, rows, against, surveys, found)
    if options.rasters is not None:
        system = next(filter(None, map(named_system, files)), None)
        shown = {name: surveys[name] for name in ("source", *METHODS) if name in surveys}
        for name, points in (shown | {"reference": against.points}).items():
            write_rasters(options.rasters / name, [points], extent, system)
        print(f"{options.rasters}: ground, canopy and density of {', '.join(shown)}, reference")
    return 0


def ratio_for(
    options: Lidar, clouds: Mapping[str, np.ndarray], extent: Extent, notes: list[str]
) -> float:
    """The ratio of the options or, if there is none, that of the last of the clouds to the source,
    on the extent."""
    if options.ratio is not None or options.thin is not None:
        return options.ratio or 4.0
    numbers = {name: int(extent.contains(points).sum()) for name, points in clouds.items()}
    ratio = list(numbers.values())[-1] / max(numbers["source"], 1)
    if ratio < 1 and options.density is None:
        notes.append(
            f"note: the source is denser than the {list(clouds)[-1]}, so that no point is added; "
            "--ratio and --density set another target"
        )
    return max(1.0, ratio)


def unit_of_files(options: Lidar, files: Sequence[Path]) -> LengthUnit:
    if options.metres_per_unit is not None:
        return unit_of(options.metres_per_unit)
    try:
        return common_unit(files)
    except DataError as error:
        raise DataError(f"{error}, or set --metres-per-unit") from None


def show(
    options: Lidar,
    rows: Mapping[str, Figures],
    against: SurveyReference,
    surveys: Mapping[str, np.ndarray],
    found: Reliability,
) -> None:
    """Write columns, maps, the reliability `found`, and a viewer, where asked for."""
    # Beyond the common extent distances would measure the edge of the other survey.
    extent, known = against.extent, against.scale.unit
    clouds = {name: points[extent.contains(points)] for name, points in surveys.items()}
    reference = against.points[extent.contains(against.points)]
    unit = "" if known.metres is None else known.name
    notes = {name: f"Chamfer {rows[name]['chamfer']:.3g} {unit}".strip() for name in clouds}
    shown = ShownPair("", clouds, reference, True, unit, notes=notes, of="reference")
    if options.picture is not None:
        maps = maps_picture(shown.titled(), reference, unit=unit)
        plots = [reliability_picture(found, unit)] if found else []
        save_picture(stacked([shown.picture(), maps, *plots]), options.picture)
    if options.view is not None:
        first = [name for name in ("source", "prediction", "model") if name in clouds]
        viewed = replace(shown, clouds={name: clouds[name] for name in first})
        write_viewer(options.view, [viewed.scene()], f"lidar against {names_of(options)[1]}")


def report(
    options: Lidar,
    rows: Mapping[str, Figures],
    against: SurveyReference,
    ratio: float | None,
    upsampler: Upsampler | None,
    notes: Sequence[str],
    found: Reliability,
) -> None:
    source, reference = names_of(options)
    scale, extent, own = against.scale, against.extent, against.figures()
    unit: LengthUnit = scale.unit
    has_source = ratio is not None
    metrics = lidar_metrics(scale, against.ground.origin, has_source)
    heading = [
        f"lidar against {reference}: {len(against.points):,} points, "
        f"{own['density']:.4g} points/{unit.name}2, gap fraction {own['gap_fraction']:.1f} %",
        f"common extent: {extent.area:,.0f} {unit.name}2 in cells of {unit.described(scale.cell)}",
        f"unit: {unit.name}"
        if unit.metres is not None
        else "unit: unknown, no file names a coordinate system, taken for metres; set it with "
        "--metres-per-unit",
        *notes,
    ]
    if ratio is not None:
        target = (
            f"to {options.density:g} points/{unit.name}2" if options.density else f"{ratio:.3g}x"
        )
        heading += [
            f"source {source} upsampled {target}; measured points kept; no "
            f"network: midpoints, random midpoints, jitter, plane (seed {options.seed})",
            describe_model(options.model, upsampler),
        ]
    heading += [*beside_baselines(rows, METHODS), *gap_closed(rows, METHODS)]
    heading += describe_reliability(found, of_surface=False)
    titled = {name.replace("_", " "): figures for name, figures in rows.items()}
    tables = tables_of("", metrics, titled, scale)
    remarks = worse_than_source(rows, metrics, METHODS)
    given = {name: getattr(options, name) for name in GIVEN}
    content = {
        "evaluation": "lidar",
        **{name: path and str(path) for name, path in given.items()},
        **({"passes": str(options.passes)} if options.passes else {}),
        "pattern": options.pattern if options.thin else None,
        "seed": options.seed,
        "model": options.model,
        "oversampling": upsampler.config.oversampling if upsampler else None,
        "ground_density": options.ground_density,
        "ratio": None if options.density else ratio,
        "density": options.density,
        "unit": unit.name,
        "metres_per_unit": unit.metres,
        "area": extent.area,
        "cell": unit.of_metres(scale.cell),
        "ground": against.ground.origin,
        "reference_figures": own,
        "rows": rows,
        "uncertainty": found,
        "remarks": remarks,
    }
    show_report(options.output, EvaluationReport(heading, tables, remarks), content)


def names_of(options: Lidar) -> tuple[str, str]:
    """What the source and the reference are."""
    if options.passes is not None:
        passes = options.passes
        return f"a flight pass of {passes}", f"the other flight passes of {passes}"
    if options.thin is not None:
        thin = options.thin
        reference = f"the points left out of the source of {thin}"
        return f"{thin}, thinned ({options.pattern}),", reference
    return str(options.source), str(options.reference)


def check(options: Lidar) -> None:
    """Raise ConfigError for options that do not fit together, FileError for the outputs."""
    given = {name for name in OPTIONS if getattr(options, name) is not None}
    has_source = bool(given & {"source", "thin", "passes"})
    lengths = [options.cell, *options.thresholds]
    lengths += [getattr(options, name) for name in given & {"metres_per_unit", "density"}]
    refused = {
        "--passes splits one survey into source and reference; leave out --reference, --source, "
        "--prediction, --second and --thin": "passes" in given and given & {*GIVEN},
        "--thin splits one survey into source and reference; leave out --reference, --source and "
        "--prediction": "thin" in given and given & {"reference", "source", "prediction"},
        "--thin needs --ratio, not --density": given >= {"thin", "density"},
        f"--pattern {options.pattern}: needs --thin": options.pattern != "random"
        and "thin" not in given,
        f"--ground-density {options.ground_density} needs --model to upsample with": "model"
        not in given
        and options.ground_density is not None,
        "nothing to compare with: give --reference, or --thin": not given
        & {"passes", "thin", "reference"},
        "--model needs --source to upsample": "model" in given and not has_source,
        "nothing to compare: give --prediction, or --source with --model": "prediction" not in given
        and not has_source,
        "--prediction and --model exclude each other; give one": given >= {"prediction", "model"},
        "--ratio and --density exclude each other; give one": given >= {"ratio", "density"},
        "--ratio and --density need --source to upsample": given & {"ratio", "density"}
        and not has_source,
        f"--ratio {options.ratio}: must be a finite number of at least 1": "ratio" in given
        and not 1 <= (options.ratio or 0) < float("inf"),
        "--metres-per-unit, --cell, --density and --thresholds must be greater than 0": not all(
            0 < length < float("inf") for length in lengths
        ),
    }
    for message, is_so in refused.items():
        if is_so:
            raise ConfigError(message)
    check_outputs(options.output, options.picture, options.view, options.rasters)
