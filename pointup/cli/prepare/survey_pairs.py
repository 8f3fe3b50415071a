"""`pointup prepare pairs`, `thin` and `passes`: their options, and the files that they take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import tyro

from pointup.cli.input_files import Inputs, find_inputs
from pointup.cli.prepare.new_dataset import NewDataset, chosen, parse_range
from pointup.cli.prepare.survey_dataset import SurveyDataset, Tiling
from pointup.errors import ConfigError
from pointup.option_help import optional


@dataclass(frozen=True, kw_only=True)
class SurveyOptions:
    """Options of all pairs from surveys."""

    tiling: Tiling = field(default_factory=Tiling)
    dataset: NewDataset


@dataclass(frozen=True, kw_only=True)
class Pairs(SurveyOptions):
    """Make pairs from a sparse and a dense survey of the same area: tiles with points of both.

    Points on ground that only one of the surveys covers are left out.
    """

    source: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="PATH ...")]
    """Sparse survey: files, or folders of files. All files of a side are one survey, in the same
    coordinate system as the other side."""
    target: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="PATH ...")]
    """Dense survey of the same area. With --separate, a file for each of --source, with its name
    whatever the extension; files in folders by their paths in them."""
    by_order: bool = False
    """With --separate, pair files in their order, whatever their names."""

    def run(self) -> int:
        from pointup.datasets.block_pairs import two_survey_pairs

        return SurveyDataset(
            sides=self._sides(),
            make=partial(two_survey_pairs, min_points=self.tiling.min_points),
            fewest_points=self.tiling.min_points,
            copies=1.0,
            tiling=self.tiling,
            dataset=self.dataset,
        ).run("prepare pairs", chosen(self, "source", "target"))

    def _sides(self) -> list[list[Path]]:
        """The files of both sides; with --separate, those of a pair have the same position."""
        sides = [_survey_files(self.source), _survey_files(self.target)]
        if self.by_order and not self.tiling.separate:
            raise ConfigError("--by-order: pairs separate files; add --separate")
        if not self.tiling.separate or len(sides[0]) == len(sides[1]) == 1:
            return sides
        return paired_files(self.source, self.target, self.by_order)


@dataclass(frozen=True, kw_only=True)
class Thin(SurveyOptions):
    """Make pairs from one dense survey: the source of each tile is thinned from its points."""

    inputs: Inputs
    """Dense survey: files, or folders of files."""
    ratio: float = 4.0
    """Target points for each source point."""
    pattern: Literal["random", "poisson", "scanline", "mixed"] = "random"
    """Thinning pattern of the source: random, poisson (evenly spaced), scanline (whole scan lines),
    or mixed (all of them in turn)."""
    target: Literal["rest", "all"] = "rest"
    """Points of the target. rest: all points that are not in the source, as if from another survey.
    all: all points, source included, which makes scores look better than they are."""

    def __post_init__(self) -> None:
        if not 1 <= self.ratio < float("inf"):
            raise ConfigError(f"--ratio {self.ratio}: must be at least 1")

    def run(self) -> int:
        from pointup.datasets.block_pairs import fewest_dense_points, thinned_pairs

        disjoint = self.target == "rest"
        return SurveyDataset(
            sides=[_survey_files(self.inputs)],
            make=partial(
                thinned_pairs,
                ratio=self.ratio,
                pattern=self.pattern,
                disjoint=disjoint,
                seed=self.dataset.seed,
                min_points=self.tiling.min_points,
            ),
            fewest_points=fewest_dense_points(self.tiling.min_points, self.ratio, disjoint),
            copies=1.0 if disjoint else 1 + 1 / self.ratio,
            tiling=self.tiling,
            dataset=self.dataset,
        ).run("prepare thin", chosen(self, "inputs", "ratio", "pattern", "target"))


@dataclass(frozen=True, kw_only=True)
class Passes(SurveyOptions):
    """Make pairs from one survey of overlapping flight passes: one pass beside the others.

    Passes are found by pauses in gps_time and by point source ids. No point is in both sides of a
    pair.
    """

    inputs: Inputs
    """Survey with gps_time or point source ids: files, or folders of files."""
    source_density: Annotated[str | None, optional("DENSITY")] = None
    """Thin the sources to this density, in points for each square unit of the files: a number, or
    LOW:HIGH to draw from for each pair, as in 6:60. Returns of a pulse stay together. Whatever it
    is, a source has at most half of the target's points."""
    target_density: Annotated[float | None, optional("DENSITY")] = None
    """Thin the targets to this density."""
    pairs_per_tile: int = 2
    """Pairs of a tile, each with another pass as source, where so many passes cover it."""

    def __post_init__(self) -> None:
        if self.target_density is not None and not 0 < self.target_density < float("inf"):
            raise ConfigError(f"--target-density {self.target_density}: must be greater than 0")
        if self.pairs_per_tile < 1:
            raise ConfigError(f"--pairs-per-tile {self.pairs_per_tile}: must be at least 1")

    def run(self) -> int:
        from pointup.datasets.block_pairs import LEAST_RATIO, pass_pairs

        info = chosen(self, "inputs", "source_density", "target_density", "pairs_per_tile")
        density = self.source_density
        return SurveyDataset(
            sides=[_survey_files(self.inputs)],
            make=partial(
                pass_pairs,
                source_density=None
                if density is None
                else parse_range("--source-density", density, 1e-6, 1e9, "6:60"),
                target_density=self.target_density,
                pairs_per_tile=self.pairs_per_tile,
                seed=self.dataset.seed,
                min_points=self.tiling.min_points,
            ),
            fewest_points=math.ceil(self.tiling.min_points * (1 + LEAST_RATIO)),
            copies=0.0,
            tiling=self.tiling,
            dataset=self.dataset,
            with_passes=True,
        ).run("prepare passes", {name: value or "as flown" for name, value in info.items()})


def paired_files(
    source: Sequence[Path], target: Sequence[Path], by_order: bool
) -> list[list[Path]]:
    """The files of both sides, those of a pair at the same position."""
    if by_order:
        sides = [_survey_files(source), _survey_files(target)]
        if len(sides[0]) != len(sides[1]):
            raise ConfigError(
                f"--by-order: --source has {len(sides[0])} files and --target {len(sides[1])}; "
                "name as many of each"
            )
        return sides
    sources, targets = _by_name(source), _by_name(target)
    alone = sorted(sources.keys() ^ targets.keys())
    if alone:
        files = ", ".join(str(sources.get(name) or targets[name]) for name in alone)
        raise ConfigError(
            f"{len(alone)} of {len(sources.keys() | targets.keys())} names are on one side "
            f"only: {files}; name files of a pair alike, or pair them in order with --by-order"
        )
    return [list(sources.values()), [targets[name] for name in sources]]


def _survey_files(paths: Sequence[Path]) -> list[Path]:
    from pointup.io.files import point_extensions

    return find_inputs(paths, point_extensions)


def _by_name(paths: Sequence[Path]) -> dict[Path, Path]:
    """The files by their names without extension, after their paths in the folders of `paths`."""
    named: dict[Path, Path] = {}
    for path in paths:
        for file in _survey_files([path]):
            inside = file.relative_to(path) if path.is_dir() else Path(file.name)
            other = named.setdefault(inside.with_suffix(""), file)
            if other != file:
                raise ConfigError(f"{other} and {file} have the same name; rename one of them")
    return named
