"""`pointup evaluate`: shapes by the field's protocol, lidar surveys, and pair datasets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from pointup.cli.evaluate.lidar import Lidar
from pointup.cli.evaluate.pairs import Pairs
from pointup.cli.evaluate.shapes import Shapes

Subject = (
    Annotated[Shapes, tyro.conf.subcommand("shapes")]
    | Annotated[Lidar, tyro.conf.subcommand("lidar")]
    | Annotated[Pairs, tyro.conf.subcommand("pairs")]
)


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Measure a model, or clouds made elsewhere, beside the no-network baseline and the floor."""

    subject: Subject

    def run(self) -> int:
        return self.subject.run()
