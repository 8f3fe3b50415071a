"""What people want of an upsampled cloud."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pointup.errors import ConfigError

MAX_LOCAL_RATIO = 16.0
"""Most points that a target density makes of one."""


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What is to be made of a cloud. Raises ConfigError for what can't be."""

    ratio: float = 4.0
    """Points out for each point in."""
    density: float | None = None
    """Points per unit of area on the ground, in place of a ratio; denser places are left alone."""
    originals: bool = True
    """Keep the measured points, and fill in between them; otherwise all points are made."""
    max_distance: float | None = None
    """Make no point farther than this from every measured one."""
    seed: int = 0
    """Decides between points that are as good as each other."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.ratio) and self.ratio >= 1):
            raise ConfigError(
                f"ratio {self.ratio:g}: must be a finite number of at least 1; thin the cloud to "
                "get fewer points"
            )
        for name in ("density", "max_distance"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name.replace('_', ' ')} {value:g}: must be positive")

    def num_out(self, num_points: int) -> int:
        """Points out, the measured ones among them; the most there can be for a density."""
        return round((self.ratio if self.density is None else MAX_LOCAL_RATIO) * num_points)
