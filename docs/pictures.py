"""Draws the pictures of README and docs with the included models:

    python docs/pictures.py [--survey transect_als.laz --reference transect_drone.laz]
                            [--meshes FOLDER]

rooms.svg needs no data. transect.png and columns.png need an airborne survey and a drone survey of
the same ground, shape_good.png and shape_bad.png a folder with the meshes that `SHAPES` names.
docs/results.md says where these data come from.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

DOCS = Path(__file__).parent

RATIO = 4
SHAPES = {
    "shape_good.png": ("odedstein__boat", 2048),
    "shape_bad.png": ("odedstein__scorpion", 512),
}
"""Picture, its mesh and its number of points, the first sampling of `pointup evaluate shapes`."""

SLICE = {"along": (20.0, 50.0), "across": (1.5, 3.5)}
"""Metres from the corner of the survey with the lowest coordinates: a slice through trees."""

# Label and colour of a row, top and height of its boxes, and the boxes: left, width, title, lines.
ROOMS = (
    ("entry points", "#e3f2fd", 20, 74, (
        (150, 250, "train.py", ("a training run, from top to bottom",)),
        (420, 560, "cli/", ("one module or folder for each command: prepare, inspect,",
                            "upsample, train, config, evaluate, doctor, bench")),
    )),
    ("activities", "#e8f5e9", 120, 100, (
        (150, 265, "training/", ("config, objective, schedule, evaluation",
                                 "run_directory/  distributed/", "faults/  tracking/")),
        (430, 170, "evaluation/", ("protocols, baselines,", "reports")),
        (615, 200, "upsampling/", ("clouds of any size:", "store/  single_pass/")),
        (830, 150, "benchmark/", ("speed and memory",)),
    )),
    ("data, network", "#fff8e1", 254, 84, (
        (150, 250, "datasets/", ("pairs on disk, tiles, splits;",
                                 "sampler, batches, augmentation")),
        (415, 180, "model/", ("Upsampler: encoder,", "attention, offsets, hub")),
        (610, 180, "synthetic/", ("procedural shapes", "and landscapes")),
        (805, 175, "visualization/", ("pictures",)),
    )),
    ("files, losses", "#f3e5f5", 372, 84, (
        (150, 330, "io/", ("files of points and meshes:", "LAS, PLY, PCD, E57, text, NumPy")),
        (495, 240, "losses.py", ("one differentiable value", "for each cloud")),
        (750, 230, "metrics.py", ("one value for each cloud,", "no gradient")),
    )),
    ("ground", "#eceff1", 490, 84, (
        (150, 460, "geometry/", ("packed clouds, neighbours, thinning, midpoints,",
                                 "surfaces; kernels/ for CUDA")),
        (625, 355, "disk.py, processes.py, progress.py", (
            "files that are written whole, locks, workers, bars;",
            "errors.py, terminal.py, option_help.py")),
    )),
)  # fmt: skip
SIZE = (1000, 640)
TITLE = "The rooms of pointup: each imports only from rooms below it"
CAPTION = (
    "Imports point down: each room imports only from itself and from rooms below it or, within a "
    "row, from some beside it."
)


def rooms_picture() -> str:
    """The rooms of the package as SVG, in rows."""
    return "\n".join(_rooms_lines()) + "\n"


def _rooms_lines() -> Iterator[str]:
    width, height = SIZE
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="Helvetica, Arial, sans-serif" role="img" '
        f'aria-label="{TITLE}">'
    )
    yield f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    for label, color, top, rise, boxes in ROOMS:
        yield f'<text x="20" y="{top + rise / 2 + 4}" font-size="13" fill="#607d8b">{label}</text>'
        for left, across, title, lines in boxes:
            centre = f'x="{left + across / 2}" text-anchor="middle"'
            yield (
                f'<rect x="{left}" y="{top}" width="{across}" height="{rise}" rx="8" '
                f'fill="{color}" stroke="#37474f" stroke-width="1.2"/>'
            )
            yield (
                f'<text {centre} y="{top + 24}" font-size="16" font-weight="bold" '
                f'fill="#1c262b">{title}</text>'
            )
            for number, line in enumerate(lines):
                y = top + 44 + 17 * number
                yield f'<text {centre} y="{y}" font-size="12.5" fill="#37474f">{line}</text>'
    yield f'<text x="150" y="612" font-size="13" fill="#607d8b">{CAPTION}</text>'
    yield '<line x1="128" y1="40" x2="128" y2="560" stroke="#90a4ae" stroke-width="2"/>'
    yield '<path d="M128 574 l-6 -14 h12 z" fill="#90a4ae"/>'
    yield "</svg>"


def draw_slices(survey: Path, reference: Path, picture: Path) -> None:
    """A slice of a survey before and after upsampling to the density of the reference, and of the
    reference. New points have the colour of their uncertainty."""
    from tempfile import TemporaryDirectory

    import laspy
    import matplotlib.pyplot as plt
    import numpy as np
    from matplotlib.colors import ListedColormap

    from pointup.cli.main import main as pointup

    before, drone = laspy.read(survey), laspy.read(reference)
    with TemporaryDirectory() as folder:
        output = Path(folder) / "dense.laz"
        options = ["--ratio", f"{len(drone) / len(before):.3f}", "--model", "forest"]
        if pointup(["upsample", str(survey), "-o", str(output), *options]):
            raise SystemExit(f"pictures.py: {survey} was not upsampled")
        clouds = {"aeroplane": before, "upsampled": laspy.read(output), "drone": drone}
    corner = clouds["aeroplane"].xyz.min(axis=0)
    long = int(np.ptp(clouds["aeroplane"].xyz, axis=0)[:2].argmax())
    # Without its darkest colours, which look like the black of measured points.
    colors = ListedColormap(plt.colormaps["turbo"](np.linspace(0.12, 0.95, 256)))
    figure, axes = plt.subplots(1, 3, figsize=(16, 7.6), sharey=True, layout="constrained")
    for panel, (title, cloud) in zip(axes, clouds.items(), strict=True):
        points = cloud.xyz - corner
        inside = np.ones(len(points), dtype=bool)
        for axis, (low, high) in ((long, SLICE["along"]), (1 - long, SLICE["across"])):
            inside &= (points[:, axis] >= low) & (points[:, axis] <= high)
        is_new = np.asarray(cloud.synthetic, dtype=bool)
        measured, new = points[inside & ~is_new], points[inside & is_new]
        panel.scatter(measured[:, long], measured[:, 2], s=3, c="#212121", linewidths=0)
        if len(new):
            uncertainty = np.asarray(cloud.uncertainty)[inside & is_new]
            dots = panel.scatter(
                new[:, long], new[:, 2], s=4, c=uncertainty, linewidths=0, cmap=colors,
                vmin=0, vmax=np.quantile(uncertainty, 0.95),
            )  # fmt: skip
            place = panel.inset_axes((0.06, 0.93, 0.42, 0.02))
            scale = figure.colorbar(dots, cax=place, orientation="horizontal", extend="max")
            scale.set_label("uncertainty of new points, m", fontsize=11)
            scale.set_ticks([0, 0.05, 0.1, 0.15])
            scale.ax.tick_params(labelsize=12)
        panel.set_title(f"{title}: {inside.sum():,} points", fontsize=18)
        panel.set_aspect("equal")
        panel.tick_params(labelsize=13)
        panel.set_xlabel("m", fontsize=13)
    axes[0].set_ylabel("height, m", fontsize=13)
    figure.savefig(picture, dpi=100)
    plt.close(figure)
    with_few_colours(picture)


def draw_columns(survey: Path, reference: Path, picture: Path) -> None:
    """Source, midpoint baseline, model and drone survey beside each other."""
    from pointup.cli.main import main as pointup

    clouds = ["--source", str(survey), "--reference", str(reference), "--model", "forest"]
    if pointup(["evaluate", "lidar", *clouds, "--picture", str(picture)]):
        raise SystemExit(f"pictures.py: {survey} was not evaluated")
    with_few_colours(picture)


def draw_shapes(meshes: Path, folder: Path) -> None:
    """Source, prediction, target and error of the shapes, as in the tables of docs/results.md."""
    from pointup import upsample
    from pointup.evaluation.pu_gcn import DrawnShapes
    from pointup.visualization.columns import evaluation_picture
    from pointup.visualization.page import save_picture

    for picture, (name, number) in SHAPES.items():
        drawn = DrawnShapes(meshes=meshes, num_source=number, ratio=RATIO)
        shape = next((shape for shape in drawn if shape.name == name), None)
        if shape is None:
            raise SystemExit(f"pictures.py: {meshes} has no mesh {name}")
        prediction = upsample(shape.source, ratio=RATIO, model="shapes")
        title = f"{name.partition('__')[2]}, {number:,} points, {RATIO}x"
        pixels = evaluation_picture(shape.source, prediction, shape.truth, title=title)
        save_picture(pixels, folder / picture)
        with_few_colours(folder / picture)


def with_few_colours(path: Path) -> None:
    """Store a picture with 256 colours, so that it is small. A scale, of few pixels, keeps its own,
    as it does not by median cut."""
    from PIL import Image

    few = Image.open(path).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE)
    few.save(path, optimize=True)


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--survey", type=Path, help="airborne survey")
    parser.add_argument("--reference", type=Path, help="drone survey of the same ground")
    parser.add_argument("--meshes", type=Path, help="folder of the meshes of shape_*.png")
    parser.add_argument("--output", type=Path, default=DOCS, help="folder of the pictures")
    options = parser.parse_args(args)
    (options.output / "rooms.svg").write_text(rooms_picture(), encoding="utf-8")
    if options.survey and options.reference:
        draw_slices(options.survey, options.reference, options.output / "transect.png")
        draw_columns(options.survey, options.reference, options.output / "columns.png")
    if options.meshes:
        draw_shapes(options.meshes, options.output)


if __name__ == "__main__":
    main()
