"""What people want of an upsampled cloud."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pointup.errors import ConfigError
from pointup.model.config import MAX_OVERSAMPLING, ModelConfig

MAX_LOCAL_RATIO = 16.0
"""Most points that a target density makes of one."""

MAX_PASS_RATIO = 8.0
"""Largest ratio that is reached in one pass; a larger one begins with a pass of PASS_RATIO."""
PASS_RATIO = 4.0


@dataclass(frozen=True, kw_only=True)
class UpsampleOptions:
    """What is to be made of a cloud. Raises ConfigError for what can't be."""

    ratio: float = 4.0
    """Points out for each point in."""
    density: float | None = None
    """Points per unit of area on the ground, in place of a ratio; denser places are left alone."""
    originals: bool = True
    """Keep the measured points, and fill in between them; otherwise all points are made."""
    max_distance: float | None = None
    """Make no point farther than this from every measured one."""
    above_ground: bool = False
    """The third coordinate is a height: make no point below the lowest returns of a survey, and
    give new points class 2 on the ground only."""
    oversampling: float | None = None
    """Points drafted for each one that is kept; None leaves it to the model."""
    seed: int = 0
    """Decides between points that are as good as each other."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.ratio) and self.ratio >= 1):
            raise ConfigError(
                f"ratio {self.ratio:g}: must be a finite number of at least 1; thin the cloud to "
                "get fewer points"
            )
        if self.oversampling is not None and not 1 <= self.oversampling <= MAX_OVERSAMPLING:
            raise ConfigError(
                f"oversampling {self.oversampling:g}: must be between 1 and {MAX_OVERSAMPLING:g}"
            )
        for name in ("density", "max_distance"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name.replace('_', ' ')} {value:g}: must be positive")

    def pass_ratios(self, num_points: int) -> list[float | None]:
        """By what each pass upsamples a cloud; None stands for what the density asks for."""
        if self.density is not None:
            return [None, None]
        ratios: list[float | None] = [*pass_ratios(self.ratio)]
        # The product is exact, and with it the number of points.
        before = num_points * PASS_RATIO ** (len(ratios) - 1)
        return [*ratios[:-1], round(self.ratio * num_points) / before]

    def oversampling_of(self, config: ModelConfig) -> float:
        """Points drafted for each one that is kept."""
        return config.oversampling if self.oversampling is None else self.oversampling

    def num_out(self, num_points: int) -> int:
        """Points out, the measured ones among them; the most there can be for a density."""
        return round((self.ratio if self.density is None else MAX_LOCAL_RATIO) * num_points)


def pass_ratios(ratio: float) -> list[float]:
    """Ratios of the passes that make up one: 16x is 4x twice, 12x is 4x and then 3x.

    At 16x, one pass takes midpoints to 32 neighbours, far off the surface; in two of 4x, the
    second one has the new points to go by.
    """
    ratios = []
    while ratio > MAX_PASS_RATIO:
        ratios.append(PASS_RATIO)
        ratio /= PASS_RATIO
    return [*ratios, ratio]
