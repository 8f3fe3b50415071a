"""Selects the points of a cloud to upsample, by their class and their withheld flag."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real

import numpy as np

from pointup.errors import ConfigError, DataError
from pointup.io.cloud import CLASSIFICATION, WITHHELD, PointCloud, attribute, is_noise


@dataclass(frozen=True, kw_only=True)
class PointFilter:
    """Selects points by their attributes `classification` and `withheld`.

    Raises ConfigError for class numbers outside of 0 to 255.
    """

    classes: tuple[int, ...] | None = None
    """Select only points of these classes; None selects all but noise."""
    include_noise: bool = False
    """Select withheld points and noise, too."""

    def __post_init__(self) -> None:
        if self.classes is not None and not self.classes:
            raise ConfigError("classes: name at least one, or leave the option out")
        for number in self.classes or ():
            if not (isinstance(number, Real) and 0 <= number <= 255):
                raise ConfigError(f"class {number}: must be between 0 and 255")

    def __call__(self, cloud: PointCloud) -> np.ndarray:
        """Mask (N,) bool of the points of a cloud to upsample.

        `classes` can name noise classes, too. A withheld point is selected only with
        `include_noise`. Raises DataError if `classes` is given and the cloud has no classification.
        """
        if self.classes is None:
            return np.ones(len(cloud), bool) if self.include_noise else ~is_noise(cloud)
        classes, withheld = attribute(cloud, CLASSIFICATION), attribute(cloud, WITHHELD)
        if classes is None:
            raise DataError("has no attribute `classification` to select classes by")
        selected = np.isin(classes, self.classes)
        return selected if withheld is None or self.include_noise else selected & (withheld == 0)
