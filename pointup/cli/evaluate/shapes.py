"""`pointup evaluate shapes`: evaluates shapes by the PU-GCN protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pointup.cli.evaluate.output import (
    Output,
    Oversampling,
    describe_model,
    open_model,
    write_shown,
)
from pointup.cli.input_files import Folder, Model, Picture, View
from pointup.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from pointup.evaluation.cloud_metrics import Figures
    from pointup.evaluation.pu_gcn import DrawnShapes, StoredShapes
    from pointup.model.upsampler import Upsampler

ROWS = {
    "model": "model",
    "prediction": "predictions",
    "midpoints": "midpoints (no network)",
    "resampled": "resampled ground truth",
}

DRAWING = ("num_source", "ratio", "seeds", "pattern", "noise")
"""Options of clouds that are sampled from meshes."""


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """Evaluate on shapes with a ground truth, by the PU-GCN protocol: CD, HD, P2F.

    Give --truth with --inputs or --predictions, folders whose files are matched by name. Add the
    option --meshes for P2F and resampled ground truth; shapes without a mesh have no P2F. Or give
    --meshes alone: inputs, truths and resampled ground truth are then independent samplings of the
    surfaces.
    """

    model: Model = None
    """Model to evaluate: included model, directory or Hub repository. Without one, all other rows
    are measured."""
    oversampling: Oversampling = None
    """Candidates of a second pass for each point that is kept, 1 to 8, as in `pointup upsample`. By
    default the model's own value."""
    truth: Folder = None
    """Folder of ground truth clouds, one file for each shape."""
    inputs: Folder = None
    """Folder of sparse clouds, to upsample to the number of points of their truths."""
    predictions: Folder = None
    """Folder of clouds that another program upsampled."""
    meshes: Folder = None
    """Folder of true surfaces (OFF, OBJ, STL, PLY), in the coordinates of the clouds."""
    ratio: float = 4.0
    """Upsampling ratio, if clouds are sampled from --meshes alone."""
    num_source: int = 2048
    """Number of points of each input, if clouds are sampled from --meshes alone."""
    seeds: int = 1
    """Number of samplings of each shape, if clouds are sampled from --meshes alone. Figures are
    their means."""
    pattern: Literal["poisson", "random"] = "poisson"
    """Sampling of the inputs from --meshes: poisson (Poisson-disk, evenly spaced), or random, with
    a spacing as irregular as lidar."""
    noise: float = 0.0
    """Standard deviation of Gaussian noise on the inputs, as a share of the mesh's furthest
    distance from its centre, if clouds are sampled from --meshes alone."""
    denoise: bool = False
    """Replace the points of the inputs, as `pointup upsample --denoise` does."""
    protocol: Literal["pu-gcn", "half"] = "pu-gcn"
    """CD and HD as the sum of both directions (pu-gcn, as in most papers), or half of it."""
    picture: Picture = None
    """Write a picture of the shapes with the highest, the median and the lowest CD."""
    view: View = None
    """Write an HTML file to look at the same shapes."""
    output: Output = field(default_factory=Output)

    def run(self) -> int:
        from pointup.evaluation.cloud_metrics import mean_figures, mean_rows
        from pointup.evaluation.pu_gcn import (
            StoredShapes,
            evaluate_shape,
            in_another_frame,
            is_subset,
            shape_metrics,
        )
        from pointup.evaluation.report import EvaluationReport, Table
        from pointup.model.config import MAX_PASS_RATIO
        from pointup.progress import tracked
        from pointup.upsampling.options import pass_ratios

        self.output.check(self.picture, self.view)
        if self.denoise and self.model is None:
            raise ConfigError("--denoise needs --model, such as noisy")
        shapes = self._shapes()
        upsampler = open_model(self.model, self.oversampling)
        measured: list[dict[str, Any]] = []
        sizes, num_subsets, num_other_sizes = set(), 0, 0
        elsewhere: dict[str, list[str]] = {"inputs": [], "predictions": []}
        for shape in tracked(shapes, len(shapes), "measuring", "shapes"):
            rows = evaluate_shape(shape, upsampler, self.protocol, self.denoise)
            measured.append({"name": shape.name, "seed": shape.seed, "rows": rows})
            num_subsets += is_subset(shape)
            if shape.prediction is not None:
                num_other_sizes += len(shape.prediction) != len(shape.truth)
            given = {"inputs": shape.source, "predictions": shape.prediction}
            for kind, points in given.items() if self.truth is not None else ():
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
        metrics = shape_metrics(self.protocol)
        denoised = ", --denoise" if self.denoise else ""
        heading = [
            f"{len(names)} shapes{self._source()}",
            *([_describe_sizes(sizes)] if sizes else []),
            f"{describe_model(self.model, upsampler)}{denoised}; protocol {self.protocol}",
            *_notes(each, num_subsets, num_other_sizes),
            *_notes_on_frames(elsewhere),
            *_notes_on_files(shapes.without_truth if isinstance(shapes, StoredShapes) else {}),
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
            "model": self.model,
            "denoise": self.denoise,
            "protocol": self.protocol,
            **self._options(),
            "heading": heading,
            "means": means,
            "shapes": measured,
        }
        self.output.show(EvaluationReport(heading, tables), content)
        self._show(shapes, measured, upsampler)
        return 0

    def _show(
        self,
        shapes: StoredShapes | DrawnShapes,
        measured: Sequence[dict[str, Any]],
        upsampler: Upsampler | None,
    ) -> None:
        """Write picture and viewer of the worst, the median and the best shape, where asked for."""
        if self.picture is None and self.view is None:
            return
        from pointup.evaluation.pairs import ShownPair, worst_to_best
        from pointup.evaluation.pu_gcn import clouds_of_shape

        row = next(iter(measured[0]["rows"]))
        chosen = worst_to_best([shape["rows"][row]["cd"] for shape in measured])
        places = {number: place for place, number in chosen.items()}
        shown: dict[str, ShownPair] = {}
        # Shapes are read or sampled again, because a set may not fit into memory.
        for number, shape in enumerate(shapes):
            if number not in places:
                continue
            rows = measured[number]["rows"]
            clouds = clouds_of_shape(shape, upsampler, self.denoise)
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
        write_shown([shown[place] for place in chosen], title, self.picture, self.view)

    def _shapes(self) -> StoredShapes | DrawnShapes:
        from pointup.evaluation.pu_gcn import DrawnShapes, StoredShapes

        if self.truth is None:
            if self.inputs is not None or self.predictions is not None:
                raise ConfigError("--inputs and --predictions need --truth to compare with")
            if self.meshes is None:
                raise ConfigError("give --truth with --inputs or --predictions, or --meshes alone")
            return DrawnShapes(
                meshes=self.meshes,
                num_source=self.num_source,
                ratio=self.ratio,
                num_seeds=self.seeds,
                pattern=self.pattern,
                noise=self.noise,
            )
        if any(getattr(self, name) != getattr(type(self), name) for name in DRAWING):
            raise ConfigError(
                "--ratio, --num-source, --seeds, --pattern and --noise are for clouds sampled from "
                "--meshes alone; leave them out, or --truth"
            )
        if self.inputs is None and self.predictions is None:
            raise ConfigError("--truth needs --inputs or --predictions to compare with it")
        if self.inputs is None and self.model is not None:
            raise ConfigError("--model needs --inputs to upsample")
        return StoredShapes(self.truth, self.inputs, self.predictions, self.meshes)

    def _options(self) -> dict[str, Any]:
        """The clouds that were measured, for the JSON file."""
        folders = ("truth", "inputs", "predictions", "meshes")
        options = {name: str(path) for name in folders if (path := getattr(self, name)) is not None}
        drawing = DRAWING if self.truth is None else ()
        return options | {name: getattr(self, name) for name in drawing}

    def _source(self) -> str:
        if self.truth is not None:
            by = f", predictions of {self.predictions}" if self.predictions is not None else ""
            return f" of {self.truth}{by}"
        times = f"{self.seeds} times " if self.seeds > 1 else ""
        noise = f", {100 * self.noise:g} % noise" if self.noise else ""
        return f", sampled {times}from {self.meshes} ({self.pattern} inputs{noise})"


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


def _notes_on_frames(elsewhere: Mapping[str, Sequence[str]]) -> list[str]:
    """Which clouds, by folder, are in another frame than their truth."""
    whose = {"inputs": " of the clouds made from them", "predictions": " of them"}
    return [
        f"{kind} in another frame than their truth: {len(names)}, the first {names[0]}; P2F, CD "
        f"target frame and Hausdorff{whose[kind]} do not apply"
        for kind, names in elsewhere.items()
        if names
    ]


def _notes_on_files(without_truth: Mapping[Path, Sequence[Path]]) -> list[str]:
    """Which files were left out, because nothing is there to compare them with."""
    return [
        f"files of {folder} without a truth of their name, left out: {len(paths)}, the first "
        f"{paths[0].name}"
        for folder, paths in without_truth.items()
    ]


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
