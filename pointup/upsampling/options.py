"""`UpsampleOptions`: the options of upsampling that the result depends on."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from numbers import Real
from typing import TYPE_CHECKING

from pointup.errors import ConfigError
from pointup.model.config import MAX_OVERSAMPLING, MAX_PASS_RATIO, ModelConfig

if TYPE_CHECKING:
    from pointup.model.upsampler import Upsampler

DEFAULT_RATIO = 4.0
"""Ratio if neither a ratio nor a density is given."""

LARGEST_RATIO = 100.0
"""Largest ratio of `pointup upsample` without `--force`."""

MAX_LOCAL_RATIO = 16.0
"""Largest number of output points for one input point at a target density, for a model whose
`max_pass_ratio` is not larger."""

PASS_RATIO = 4.0
"""Ratio of the first passes where the ratio is above the largest of a single pass."""


@dataclass(frozen=True, kw_only=True)
class UpsampleOptions:
    """Options of upsampling. Raises ConfigError for invalid values."""

    ratio: float = DEFAULT_RATIO
    """Output points for each input point, 1 or more."""
    density: float | None = None
    """Target density in points per unit of area on the ground, instead of a ratio. Denser places
    get no new points."""
    originals: bool = True
    """Keep the measured points and add new ones; if False, the output has new points only."""
    max_distance: float | None = None
    """Largest distance of a new point to the nearest measured point, in the unit of the file."""
    max_uncertainty: float | None = None
    """Largest uncertainty of a new point, in the unit of the file."""
    above_ground: bool = False
    """The third coordinate is a height: no new point lies below the ground, and only new points
    on the ground get class 2."""
    ground_density: float | None = None
    """Largest density of the new points on the ground below crowns, in points per unit of area.
    None: that of the ground returns where the ground is seen. 0: no such points."""
    oversampling: float | None = None
    """Candidates of a second pass for each point that is kept; None takes the model's value."""
    uncertainty: bool = True
    """Give new points their uncertainty as an attribute, if the model predicts it."""
    seed: int = 0
    """Of the order in which candidates are compared."""

    def __post_init__(self) -> None:
        lengths = ("density", "max_distance", "max_uncertainty")
        for name in ("ratio", "seed", *lengths, "ground_density", "oversampling"):
            value = getattr(self, name)
            if not (isinstance(value, Real) or (value is None and name not in ("ratio", "seed"))):
                raise ConfigError(
                    f"{name.replace('_', ' ')} {value!r:.40}: give a number, such as 4.0"
                )
        if not (math.isfinite(self.ratio) and self.ratio >= 1):
            raise ConfigError(
                f"ratio {self.ratio:g}: must be a finite number of at least 1; thin the cloud to "
                "get fewer points"
            )
        if not 0 <= self.seed < 2**32 or self.seed % 1:
            raise ConfigError(f"seed {self.seed}: must be an integer from 0 to {2**32 - 1}")
        if self.oversampling is not None and not 1 <= self.oversampling <= MAX_OVERSAMPLING:
            raise ConfigError(
                f"oversampling {self.oversampling:g}: must be between 1 and {MAX_OVERSAMPLING:g}"
            )
        if self.ground_density is not None and not 0 <= self.ground_density < math.inf:
            raise ConfigError(f"ground density {self.ground_density:g}: must be 0 or more")
        for name in lengths:
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name.replace('_', ' ')} {value:g}: must be positive")

    def with_heights(self, has_heights: bool) -> UpsampleOptions:
        """These options for a cloud whose third coordinate is a height, or not."""
        if self.ground_density and not has_heights:
            raise ConfigError(
                f"ground density {self.ground_density:g}: the third coordinate is no height here; "
                "add --above-ground if it is"
            )
        return replace(self, above_ground=has_heights)

    def pass_ratios(self, num_points: int, largest: float = MAX_PASS_RATIO) -> list[float | None]:
        """The ratio of each pass over `num_points` points, at most `largest`; None for passes by
        target density."""
        if self.density is not None:
            return [None, None]
        ratios: list[float | None] = [*pass_ratios(self.ratio, largest)]
        # The product of the ratios, and so the number of output points, is exact.
        before = num_points * PASS_RATIO ** (len(ratios) - 1)
        return [*ratios[:-1], round(self.ratio * num_points) / before]

    @property
    def has_exact_numbers(self) -> bool:
        """Whether there are as many new points as the ratio says; with a bound there are fewer."""
        return self.max_distance is None and self.max_uncertainty is None

    def has_uncertainty(self, model: Upsampler) -> bool:
        """Whether new points get the attribute: by these options and the model."""
        return self.uncertainty and model.calibration is not None

    def is_upright(self, config: ModelConfig) -> bool:
        """Whether the third coordinate of the cloud is a height, by these options or the model."""
        return self.above_ground or self.density is not None or config.column_layers > 0

    def oversampling_of(self, config: ModelConfig) -> float:
        """Candidates of a second pass for each point that is kept, by the options or the model."""
        return config.oversampling if self.oversampling is None else self.oversampling

    def num_out(self, num_points: int, max_pass_ratio: float = MAX_PASS_RATIO) -> int:
        """Number of output points, measured ones included; for a density the upper bound."""
        largest = max(MAX_LOCAL_RATIO, max_pass_ratio)
        return round((self.ratio if self.density is None else largest) * num_points)


def pass_ratios(ratio: float, largest: float = MAX_PASS_RATIO) -> list[float]:
    """Split a ratio into the ratios of passes: 16x becomes 4x and 4x, 12x becomes 4x and 3x.

    A single pass of 16x takes midpoints to 32 neighbours, which lie far off the surface. In two
    passes of 4x, the second one takes midpoints between the new points. `largest` is the
    `max_pass_ratio` of the model.
    """
    ratios = []
    while ratio > largest:
        ratios.append(PASS_RATIO)
        ratio /= PASS_RATIO
    return [*ratios, ratio]
