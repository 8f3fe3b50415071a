"""`pointup evaluate`: shapes by the PU-GCN protocol, lidar surveys, and pair datasets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from pointup.cli.evaluate.lidar import Lidar
from pointup.cli.evaluate.pairs import EvaluatedPairs
from pointup.cli.evaluate.shapes import Shapes

Subject = (
    Annotated[Shapes, tyro.conf.subcommand("shapes")]
    | Annotated[Lidar, tyro.conf.subcommand("lidar")]
    | Annotated[EvaluatedPairs, tyro.conf.subcommand("pairs")]
)


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Measure a model, or clouds upsampled by other programs, beside no-network baselines.

    If there is a second sampling of the true surface, it is measured as "resampled ground truth".
    """

    subject: Subject

    def run(self) -> int:
        return self.subject.run()
