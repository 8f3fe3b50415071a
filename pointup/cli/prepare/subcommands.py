"""`pointup prepare`: makes pairs from surveys, shapes and simulated scenes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from pointup.cli.prepare.join import Join
from pointup.cli.prepare.scenes import Scenes
from pointup.cli.prepare.shape_pairs import H5, Clouds, Default, Meshes
from pointup.cli.prepare.survey_pairs import Pairs, Passes, Thin

Source = (
    Annotated[Pairs, tyro.conf.subcommand("pairs")]
    | Annotated[Thin, tyro.conf.subcommand("thin")]
    | Annotated[Passes, tyro.conf.subcommand("passes")]
    | Annotated[Meshes, tyro.conf.subcommand("meshes")]
    | Annotated[Clouds, tyro.conf.subcommand("clouds")]
    | Annotated[H5, tyro.conf.subcommand("h5")]
    | Annotated[Scenes, tyro.conf.subcommand("scenes")]
    | Annotated[Default, tyro.conf.subcommand("default")]
    | Annotated[Join, tyro.conf.subcommand("join")]
)


@dataclass(frozen=True, kw_only=True)
class Prepare:
    """Make a pair dataset from surveys, shapes, simulated scenes or pair datasets."""

    source: Source

    def run(self) -> int:
        return self.source.run()
