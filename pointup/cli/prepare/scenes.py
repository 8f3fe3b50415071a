"""`pointup prepare scenes`: makes pairs of simulated surveys, from an aeroplane to a drone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import tyro

from pointup.cli.prepare.new_dataset import NewDataset, chosen, parse_range
from pointup.errors import ConfigError
from pointup.option_help import optional

if TYPE_CHECKING:
    from pointup.datasets.pair import Pair
    from pointup.geometry.surfaces import Surface

Kind = Literal[
    "forest-leaf-on", "forest-leaf-off", "conifer", "mixed", "slope", "shrubs", "garden", "street",
    "field",
]  # fmt: skip
ALL_KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, kw_only=True)
class Scenes:
    """Make pairs of simulated surveys of landscapes: from an aeroplane, and from a drone.

    Validation pairs have a second, independent drone survey and the true surface. Their scenes are
    never those of training pairs, whatever the seeds.
    """

    num_pairs: int = 100
    """Number of pairs."""
    tile: float = 10.0
    """Side length of the square tiles in metres."""
    source_density: str = "6:22"
    """Source points per square metre: a number, or LOW:HIGH to draw from."""
    target_density: float = 300.0
    """Target points per square metre."""
    ratio: Annotated[tuple[float, ...], optional("RATIO ...")] = ()
    """Target points for each source point, drawn from these numbers; replaces --target-density."""
    kinds: Annotated[tuple[Kind, ...], tyro.conf.arg(help_behavior_hint="(all by default)")] = (
        ALL_KINDS
    )
    """Kinds of landscape, in turn."""
    movement: str = "0"
    """Displacement of plants between the two surveys, by wind, growth and new leaves: root mean
    square of leaves 10 m above the ground and higher, in metres. A number, or LOW:HIGH to draw
    from. In a real pair, a year apart, it is about 0.7."""
    dataset: NewDataset

    def __post_init__(self) -> None:
        if self.num_pairs < 1:
            raise ConfigError(f"--num-pairs {self.num_pairs}: must be at least 1")
        if not 4 <= self.tile <= 100:
            raise ConfigError(f"--tile {self.tile}: must lie in [4, 100] metres")
        if not 1 <= self.target_density <= 2000:
            raise ConfigError(f"--target-density {self.target_density}: must lie in [1, 2000]")
        if any(not 1 <= ratio <= 100 for ratio in self.ratio):
            raise ConfigError(f"--ratio {self.ratio}: each must lie in [1, 100]")
        if not self.kinds:
            raise ConfigError("--kinds: name at least one kind")
        from pointup.synthetic.scene_pairs import MIN_POINTS

        self.distances()
        # Twice as many, because scenes hide parts of their ground and density varies.
        if self.densities()[0] * self.tile**2 < 2 * MIN_POINTS:
            smallest = (2 * MIN_POINTS / self.densities()[0]) ** 0.5
            raise ConfigError(
                f"--tile {self.tile:g}: holds too few points of --source-density "
                f"{self.source_density}; give at least {smallest:.1f} metres"
            )

    def densities(self) -> tuple[float, float]:
        """Smallest and largest density of the source."""
        return parse_range("--source-density", self.source_density, 0.5, 500, "6:22")

    def distances(self) -> tuple[float, float]:
        """Smallest and largest displacement of plants."""
        return parse_range("--movement", self.movement, 0, 5, "0:0.8")

    def run(self) -> int:
        from pointup.synthetic.scene_pairs import RECIPE, SurveyPlan, survey_pair

        plan = SurveyPlan(
            self.tile,
            self.densities(),
            self.target_density,
            self.ratio,
            self.kinds,
            self.distances(),
        )
        num_validation = round(self.dataset.validation * self.num_pairs)
        surfaces: dict[str, Surface] = {}
        with self.dataset.making() as making:

            def pairs(validation: bool, number: int, title: str) -> Iterator[Pair]:
                calls = [
                    partial(survey_pair, plan, self.dataset.seed, validation, index)
                    for index in range(number)
                ]
                for pair, surface in making.each(calls, number, title):
                    if surface is not None:
                        surfaces[pair.surface] = surface
                    yield pair

            names = ("tile", "source_density", "target_density", "ratio", "kinds", "movement")
            info = {"command": "prepare scenes", "recipe": RECIPE, **chosen(self, *names)}
            return making.write(
                pairs(False, self.num_pairs - num_validation, "training scenes"),
                pairs(True, num_validation, "validation scenes"),
                info,
                surfaces,
            )
