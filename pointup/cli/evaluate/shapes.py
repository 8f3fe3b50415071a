"""`pointup evaluate shapes`: evaluates shapes by the PU-GCN protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pointup.cli.evaluate import Shapes
from pointup.cli.evaluate.output import (
    check_outputs,
    describe_model,
    open_model,
    show_report,
    write_shown,
)
from pointup.errors import ConfigError
from pointup.evaluation.cloud_metrics import Figures, mean_figures, mean_rows
from pointup.evaluation.pairs import ShownPair, worst_to_best
from pointup.evaluation.pu_gcn import (
    DrawnShapes,
    StoredShapes,
    clouds_of_shape,
    evaluate_shape,
    in_another_frame,
    is_subset,
    shape_metrics,
)
from pointup.evaluation.report import EvaluationReport, Table
from pointup.evaluation.uncertainty import (
    Reliability,
    describe_reliability,
    measured_uncertainty,
    reliability,
)
from pointup.io.cloud import PointCloud
from pointup.model.config import MAX_PASS_RATIO
from pointup.model.upsampler import Upsampler
from pointup.progress import tracked
from pointup.upsampling.options import pass_ratios

ROWS = {
    "model": "model",
    "prediction": "predictions",
    "midpoints": "midpoints (no network)",
    "resampled": "resampled ground truth",
}

DRAWING = ("num_source", "ratio", "seeds", "pattern", "noise")
"""Options of clouds that are sampled from meshes."""


def evaluate(options: Shapes) -> int:
    """Measure the shapes, and write the report. Returns the exit status."""
    check_outputs(options.output, options.picture, options.view)
    if options.denoise and options.model is None:
        raise ConfigError("--denoise needs --model, such as noisy")
    shapes = chosen_shapes(options)
    upsampler = open_model(options.model, options.oversampling)
    shapes.check_files()  # Measuring a set takes minutes.
    measured: list[dict[str, Any]] = []
    trusted: list[tuple[np.ndarray, np.ndarray]] = []
    sizes, num_subsets, num_other_sizes = set(), 0, 0
    elsewhere: dict[str, list[str]] = {"inputs": [], "predictions": []}
    whose = {"inputs": " of the clouds made from them", "predictions": " of them"}
    for shape in tracked(shapes, len(shapes), "measuring", "shapes"):
        made: list[PointCloud] = []
        rows = evaluate_shape(shape, upsampler, options.protocol, options.denoise, made)
        if (surface := shape.surface) is not None:
            trusted += [measured_uncertainty(cloud, shape.truth, surface) for cloud in made]
        measured.append({"name": shape.name, "seed": shape.seed, "rows": rows})
        num_subsets += is_subset(shape)
        if shape.prediction is not None:
            num_other_sizes += len(shape.prediction) != len(shape.truth)
        given = {"inputs": shape.source, "predictions": shape.prediction}
        for kind, points in given.items() if options.truth is not None else ():
            if points is not None and in_another_frame(points, shape.truth):
                elsewhere[kind].append(shape.name)
        if shape.source is not None:
            ratio = len(shape.truth) / len(shape.source)
            # The midpoints are made in the passes of the protocol, whatever the model's are.
            largest = [upsampler.config.max_pass_ratio] if upsampler else []
            passes = [len(pass_ratios(ratio, most)) for most in (*largest, MAX_PASS_RATIO)]
            sizes.add((len(shape.source), len(shape.truth), ratio, passes[0], passes[-1]))

    names = list(dict.fromkeys(shape["name"] for shape in measured))
    by_name = {name: [s["rows"] for s in measured if s["name"] == name] for name in names}
    means = mean_rows([mean_rows(rows) for rows in by_name.values()])
    first = next(iter(means))
    each = {name: mean_figures([r[first] for r in rows]) for name, rows in by_name.items()}
    metrics = shape_metrics(options.protocol, are_drawn=options.truth is None)
    found = reliability(trusted)
    denoised = ", --denoise" if options.denoise else ""
    heading = [
        f"{len(names)} shapes{_source(options)}",
        *([_describe_sizes(sizes)] if sizes else []),
        f"{describe_model(options.model, upsampler)}{denoised}; protocol {options.protocol}",
        *describe_reliability(found, of_surface=True),
        *_notes(each, num_subsets, num_other_sizes),
        *(
            f"{kind} in another frame than their truth: {len(found)}, the first {found[0]}; P2F, "
            f"CD target frame and Hausdorff{whose[kind]} do not apply"
            for kind, found in elsewhere.items()
            if found
        ),
        *(
            f"files of {folder} without a truth of their name, left out: {len(paths)}, the first "
            f"{paths[0].name}"
            for folder, paths in getattr(shapes, "without_truth", {}).items()
        ),
    ]
    having = {row: sum(row in rows[0] for rows in by_name.values()) for row in means}
    of_some = {row: f" ({n} shapes)" if n < len(names) else "" for row, n in having.items()}
    summary = {ROWS[row] + of_some[row]: means[row] for row in ROWS if row in means}
    tables = [
        Table(f"{ROWS[first]}, each", metrics, each),
        Table(f"mean of {len(names)} shapes", metrics, summary),
    ]
    content = {
        "evaluation": "shapes",
        "model": options.model,
        "oversampling": upsampler.config.oversampling if upsampler else None,
        "denoise": options.denoise,
        "protocol": options.protocol,
        **_clouds(options),
        "heading": heading,
        "means": means,
        "uncertainty": found,
        "shapes": measured,
    }
    show_report(options.output, EvaluationReport(heading, tables), content)
    if options.picture is not None or options.view is not None:
        show(options, shapes, measured, upsampler, found)
    return 0


def show(
    options: Shapes,
    shapes: StoredShapes | DrawnShapes,
    measured: Sequence[dict[str, Any]],
    upsampler: Upsampler | None,
    found: Reliability,
) -> None:
    """Write picture and viewer of the worst, the median and the best shape, where asked for."""
    row = next(iter(measured[0]["rows"]))
    chosen = worst_to_best([shape["rows"][row]["cd"] for shape in measured])
    places = {number: place for place, number in chosen.items()}
    shown: dict[str, ShownPair] = {}
    # Shapes are read or sampled again, because a set may not fit into memory.
    for number, shape in enumerate(shapes):
        if number not in places:
            continue
        rows = measured[number]["rows"]
        clouds = clouds_of_shape(shape, upsampler, options.denoise)
        if shape.source is not None:
            clouds["source"] = shape.source
        shown[places[number]] = ShownPair(
            f"{places[number]}: {shape.name}",
            clouds,
            shape.truth,
            vertical=False,
            note=f"CD {rows[row]['cd']:.3g} x1e-3, {ROWS[row]}",
            notes={name: f"CD {figures['cd']:.3g} x1e-3" for name, figures in rows.items()},
            of="ground truth",
        )
    title = f"{len({shape['name'] for shape in measured})} shapes"
    write_shown([shown[place] for place in chosen], title, options.picture, options.view, found)


def chosen_shapes(options: Shapes) -> StoredShapes | DrawnShapes:
    if options.truth is None:
        if options.inputs is not None or options.predictions is not None:
            raise ConfigError("--inputs and --predictions need --truth to compare with")
        if options.meshes is None:
            raise ConfigError("give --truth with --inputs or --predictions, or --meshes alone")
        return DrawnShapes(
            meshes=options.meshes,
            num_source=options.num_source,
            ratio=options.ratio,
            num_seeds=options.seeds,
            pattern=options.pattern,
            noise=options.noise,
        )
    if any(getattr(options, name) != getattr(Shapes, name) for name in DRAWING):
        raise ConfigError(
            "--ratio, --num-source, --seeds, --pattern and --noise are for clouds sampled from "
            "--meshes alone; leave them out, or --truth"
        )
    if options.inputs is None and options.predictions is None:
        raise ConfigError("--truth needs --inputs or --predictions to compare with it")
    if options.inputs is None and options.model is not None:
        raise ConfigError("--model needs --inputs to upsample")
    return StoredShapes(options.truth, options.inputs, options.predictions, options.meshes)


def _clouds(options: Shapes) -> dict[str, Any]:
    """The clouds that were measured, for the JSON file."""
    folders = ("truth", "inputs", "predictions", "meshes")
    found = {name: str(path) for name in folders if (path := getattr(options, name)) is not None}
    drawing = DRAWING if options.truth is None else ()
    return found | {name: getattr(options, name) for name in drawing}


def _source(options: Shapes) -> str:
    if options.truth is not None:
        by = f", predictions of {options.predictions}" if options.predictions is not None else ""
        return f" of {options.truth}{by}"
    times = f"{options.seeds} times " if options.seeds > 1 else ""
    noise = f", {100 * options.noise:g} % noise" if options.noise else ""
    return f", sampled {times}from {options.meshes} ({options.pattern} inputs{noise})"


def _notes(each: Mapping[str, Figures], num_subsets: int, num_other_sizes: int) -> list[str]:
    """What to know before comparing the figures of `each` shape with published ones."""
    notes = []
    without_mesh = [name for name, figures in each.items() if "p2f" not in figures]
    if 0 < len(without_mesh) < len(each):
        names = ", ".join(without_mesh[:3]) + (", ..." if len(without_mesh) > 3 else "")
        notes.append(
            f"P2F and resampled ground truth of {len(each) - len(without_mesh)} shapes; no mesh of "
            f"{names}"
        )
    if num_other_sizes:
        notes.append(
            f"predictions with another number of points than their truth: {num_other_sizes}; CD "
            "and HD depend on this number"
        )
    if num_subsets:
        notes.append(
            f"inputs that are subsets of their truths: {num_subsets}; methods that keep the input "
            "have a lower CD on them than on independent inputs"
        )
    return notes


def _describe_sizes(sizes: set[tuple[int, int, float, int, int]]) -> str:
    """Numbers of points and ratios; of one size also the passes of model and midpoints."""
    if len(sizes) > 1:
        ratios = sorted(size[2] for size in sizes)
        return f"inputs and truths of various sizes, ratios {ratios[0]:.3g} to {ratios[-1]:.3g}"
    num_source, num_truth, ratio, passes, of_midpoints = sizes.pop()
    in_passes = f" in {passes} passes" if passes > 1 else ""
    if passes != of_midpoints:
        in_passes = f", model in {passes} pass{'es' * (passes > 1)}, midpoints in {of_midpoints}"
    return f"{num_source:,} points to {num_truth:,}: {ratio:.4g}x{in_passes}"
