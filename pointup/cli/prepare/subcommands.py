"""`pointup prepare`: makes pairs from surveys, shapes and simulated scenes."""

from __future__ import annotations

from dataclasses import dataclass

from pointup.cli.prepare.join import Join
from pointup.cli.prepare.scenes import Scenes
from pointup.cli.prepare.shape_pairs import H5, Clouds, Default, Meshes
from pointup.cli.prepare.survey_pairs import Pairs, Passes, Thin


@dataclass(frozen=True, kw_only=True)
class Prepare:
    """Make a pair dataset from surveys, shapes, simulated scenes or pair datasets."""

    source: Pairs | Thin | Passes | Meshes | Clouds | H5 | Scenes | Default | Join

    def run(self) -> int:
        return self.source.run()
