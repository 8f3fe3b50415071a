"""`pointup inspect`: prints statistics of a pair dataset or of a file of points."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from pointup.cli.input_files import Picture, View, check_shown, holds_points
from pointup.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Inspect:
    """Print statistics of a pair dataset, and its bad samples; or coordinate system, extent,
    density, classes and, of new points, the uncertainty of files or of a folder with LAS or LAZ
    files."""

    dataset: Annotated[
        tyro.conf.Positional[tuple[str, ...]],
        tyro.conf.arg(metavar="DIR|FILE ...", help_behavior_hint="(required)"),
    ]
    """Directory made by `pointup prepare`, or name of a dataset on the Hub; or files of points,
    folders with LAS or LAZ files, and virtual point clouds (.vpc), which are inspected as one."""
    picture: Picture = None
    """Write a picture: histograms of sizes, and up to four pairs, source beside target."""
    view: View = None
    """Write an HTML file to look at up to six pairs, source beside target."""
    min_points: int = 2
    """A sample is bad if its source or target has fewer points than this."""
    deep: bool = False
    """Read all points and compare them with their checksums, to find damage since they were
    written. Otherwise the sample table is read, and the points of 64 samples."""
    strict: bool = False
    """Exit with status 1 if any sample is bad."""
    json: bool = False
    """Print all results as JSON."""

    def run(self) -> int:
        paths = [Path(name) for name in self.dataset]
        if len(paths) != 1 or holds_points(paths[0]):
            from pointup.cli.file_statistics import inspect_files, report

            if paths and (self.picture or self.view or self.deep):
                raise ConfigError(
                    f"{paths[0]}: holds points; --picture, --view, --deep need a dataset"
                )
            for path in paths:
                if path.is_dir() and not holds_points(path):
                    raise ConfigError(f"{path}: not a folder of points; inspect it by itself")
            found = inspect_files(paths)
            print(json.dumps(found, indent=2) if self.json else report(found))
            return 0
        from pointup.cli import dataset_statistics as statistics

        check_shown(self.picture, self.view)
        (dataset,) = self.dataset
        splits = statistics.inspect_dataset(dataset, self.min_points, self.deep)
        held_out = statistics.held_out_of(dataset) if len(splits) > 1 else None
        if self.json:
            print(json.dumps(statistics.as_json(dataset, splits, held_out), indent=2))
        else:
            print(statistics.report(dataset, splits, held_out))
        if self.picture:
            statistics.write_dataset_picture(dataset, splits, self.picture)
        if self.view:
            statistics.write_dataset_view(dataset, splits, self.view)
        return int(self.strict and any(split.bad for split in splits))
