"""`pointup prepare`: makes pair datasets from survey files, meshes and HDF5 patches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from pointup.cli.prepare.join import Join
from pointup.cli.prepare.shapes import H5, Default, Meshes
from pointup.cli.prepare.surveys import Pairs, Thin

Source = (
    Annotated[Pairs, tyro.conf.subcommand("pairs")]
    | Annotated[Thin, tyro.conf.subcommand("thin")]
    | Annotated[Meshes, tyro.conf.subcommand("meshes")]
    | Annotated[H5, tyro.conf.subcommand("h5")]
    | Annotated[Default, tyro.conf.subcommand("default")]
    | Annotated[Join, tyro.conf.subcommand("join")]
)


@dataclass(frozen=True, kw_only=True)
class Prepare:
    """Make a pair dataset from survey files, meshes, HDF5 patches or other pair datasets."""

    source: Source

    def run(self) -> int:
        return self.source.run()
