"""`pointup evaluate`: shapes by the PU-GCN protocol, lidar surveys, and pair datasets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from pointup.cli.input_files import File, Folder, Model, Picture, View
from pointup.option_help import optional

Oversampling = Annotated[float | None, optional("O")]


@dataclass(frozen=True, kw_only=True)
class Output:
    """Output files, in addition to the terminal."""

    json: File = None
    """Write all figures, also of single clouds, and the metrics' conventions to this JSON file."""
    markdown: File = None
    """Write the printed tables to this Markdown file."""


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """Evaluate on shapes with a ground truth, by the PU-GCN protocol: CD, HD, P2F.

    Give --truth with --inputs or --predictions, folders whose files are matched by name. Add the
    option --meshes for P2F and resampled ground truth; shapes without a mesh have no P2F. With
    only --meshes, inputs, truths and resampled ground truth are independent samplings of the
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
    """Write a picture of the shapes with the highest, the median and the lowest CD, and of
    how reliable the uncertainty of new points is."""
    view: View = None
    """Write an HTML file to look at the same shapes."""
    output: Output = field(default_factory=Output)

    def run(self) -> int:
        from pointup.cli.evaluate.shapes import evaluate

        return evaluate(self)


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
    """Write a picture of the surveys beside each other: overview, cross-section, close-up, maps of
    density and of the distance to the reference, and how reliable the uncertainty is."""
    view: View = None
    """Write an HTML file to look at the surveys, coloured by their distance to the reference."""
    rasters: Folder = None
    """Write GeoTIFFs of the source, the model's or predicted survey and the reference to this
    folder, on one grid of `--cell`: lowest and highest point, and density. Needs rasterio."""
    output: Output = field(default_factory=Output)

    def run(self) -> int:
        from pointup.cli.evaluate.lidar import evaluate

        return evaluate(self)


@dataclass(frozen=True, kw_only=True)
class EvaluatedPairs:
    """Evaluate on a pair dataset: the figures of validation in training, and those of surveys."""

    dataset: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DATASET")]
    """Directory made by `pointup prepare`, or the name of a dataset on the Hub."""
    model: Model = None
    """Model to evaluate: included model, directory or Hub repository. Without one, baselines,
    source and resampled ground truth are measured."""
    as_written: bool = False
    """Evaluate the output of `pointup upsample`, as validation in training does: with measured
    points kept, thinning and relaxation. By default the output of the network is evaluated."""
    oversampling: Oversampling = None
    """Candidates of a second pass for each point that is kept, 1 to 8, as in `pointup upsample`.
    Needs --as-written. By default the model's own value."""
    split: str = "validation"
    """Split of the dataset: train or validation."""
    ratio: Annotated[float | None, optional("R")] = None
    """Upsampling ratio, 1 or more. By default that of each pair. Same as --ratio of train.py."""
    max_ratio: float = 16.0
    """Largest ratio: pairs with a larger one are upsampled by this one. Same as --max-ratio of
    train.py."""
    token_budget: int = 24576
    """Points (source and target) to process at a time. A larger pair is processed alone."""
    metres_per_unit: Annotated[float | None, optional("LENGTH")] = None
    """Length in metres of the unit of the coordinates, such as 0.3048 for feet. By default that of
    the files that the dataset was made from."""
    seed: int = 0
    """Seed of the random baselines."""
    picture: Picture = None
    """Write a picture of the worst, the median and the best pair, by the Chamfer distance of the
    model as a share of that of the midpoints, and of how reliable the uncertainty is."""
    view: View = None
    """Write an HTML file to look at the same pairs."""
    output: Output = field(default_factory=Output)

    def run(self) -> int:
        from pointup.cli.evaluate.pairs import evaluate

        return evaluate(self)


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Measure a model, or clouds upsampled by other programs, beside no-network baselines.

    If there is a second sampling of the true surface, it is measured as "resampled ground truth".
    """

    subject: Shapes | Lidar | Annotated[EvaluatedPairs, tyro.conf.subcommand("pairs")]

    def run(self) -> int:
        return self.subject.run()
