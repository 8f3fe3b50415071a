"""`pointup view`: writes clouds into one HTML file to look at."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, combinations
from typing import TYPE_CHECKING, Annotated, Literal

from pointup.cli.input_files import File, HtmlFile, Inputs, Title, describe_page
from pointup.errors import ConfigError
from pointup.option_help import optional
from pointup.terminal import note

if TYPE_CHECKING:
    from pointup.visualization.viewer.scenes import Scene

REFERENCE = "reference"
"""Name of the cloud of --reference."""
TOUCHING = 0.01
"""Tiles that lie side by side are at most this share of their extent apart."""


@dataclass(frozen=True, kw_only=True)
class View:
    """Show point clouds in a browser.

    Writes one HTML file that needs no server and no network. Each file or folder becomes a cloud.
    All are shown side by side with one camera, faded over each other, or together. They must have
    the same coordinates, such as a survey before and after upsampling, and a reference.
    """

    inputs: Inputs
    """Files to show, or folders of tiles, which become one cloud each."""
    output: HtmlFile
    """HTML file to write."""
    names: Annotated[tuple[str, ...] | None, optional("NAME ...")] = None
    """Names of the clouds, one for each input. By default the names of the files."""
    reference: File = None
    """One more cloud, named reference; the others can be coloured by their distance to it."""
    max_points: int = 2_000_000
    """Largest number of points of each cloud; of more, a random subset is shown."""
    up: Literal["y", "z"] | None = None
    """Axis that points upwards. By default z for LAS and LAZ and for flat clouds, else y."""
    title: Title = None
    """Title of the page. By default the names of the clouds."""

    def run(self) -> int:
        from pointup.cli.coordinate_systems import notes_on_systems
        from pointup.cli.input_files import find_inputs, name_inputs
        from pointup.io.files import point_extensions
        from pointup.visualization.viewer.document import check_viewer_path, write_viewer
        from pointup.visualization.viewer.scenes import scene_of_files

        check_viewer_path(self.output)
        if not self.inputs:
            raise ConfigError("no input: name files or folders to show")
        paths = [*self.inputs, *([self.reference] if self.reference else [])]
        names = list(name_inputs(paths))[: len(self.inputs)]
        if self.names is not None:
            if len(self.names) != len(self.inputs) or len(set(self.names)) < len(self.names):
                raise ConfigError(
                    f"--names: give {len(self.inputs)} different names, one for each input"
                )
            if not all(name.strip() for name in self.names):
                raise ConfigError("--names: a name is empty; give each input one")
            names = list(self.names)
        if self.reference:
            if REFERENCE in names:
                raise ConfigError(
                    f"--names: {REFERENCE} is the name of the --reference; give the input another"
                )
            names.append(REFERENCE)
        groups = {
            name: find_inputs([path], point_extensions)
            for name, path in zip(names, paths, strict=True)
        }
        note(*notes_on_systems(list(chain.from_iterable(groups.values()))))
        reference = REFERENCE if self.reference else None
        scene = scene_of_files(groups, reference, self.max_points, self.up)
        note(*notes_on_places(scene))
        size = write_viewer(self.output, [scene], self.title or scene.name)
        for layer in scene.layers:
            shown = len(layer.positions)
            part = "" if shown == layer.num_points else f", {shown:,} of them shown"
            print(f"{layer.name}: {layer.num_points:,} points{part}")
        print(describe_page(self.output, size))
        return 0


def notes_on_places(scene: Scene) -> list[str]:
    """A note on each cloud whose horizontal bounding box is apart from those of all others: they
    appear as dots far from each other, and distances to a reference say nothing.
    """
    import numpy as np

    axes = [0, 1] if scene.up == "z" else [0, 2]
    boxes = {
        layer.name: np.array([layer.positions.min(axis=0)[axes], layer.positions.max(axis=0)[axes]])
        for layer in scene.layers
        if len(layer.positions)
    }
    if len(boxes) < 2:
        return []
    extent = max(float((high - low).max()) for low, high in boxes.values())
    gaps = {}
    for pair in combinations(boxes, 2):
        (low, high), (other_low, other_high) = (boxes[name] for name in pair)
        beside = np.maximum(other_low - high, low - other_high)
        gaps[pair] = float(np.linalg.norm(np.maximum(beside, 0)))
    nearest = [
        min((pair for pair in gaps if name in pair), key=lambda pair: gaps[pair]) for name in boxes
    ]
    notes = []
    for pair in dict.fromkeys(nearest):
        gap = gaps[pair]
        if gap > TOUCHING * extent:
            distance = f"{gap:,.0f}" if gap >= 100 else f"{gap:.3g}"
            notes.append(
                f"{pair[0]} and {pair[1]} do not overlap: they are {distance} {scene.unit}".rstrip()
                + " apart. Check that they are of the same place and in the same coordinate system"
            )
    return notes
