"""Which points of a cloud are upsampled, and which are left as they are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pointup.errors import ConfigError, DataError
from pointup.io.cloud import PointCloud

NOISE_CLASSES = (7, 18)
"""Low and high noise, as ASPRS numbers them."""
CLASSIFICATION, WITHHELD = "classification", "withheld"


@dataclass(frozen=True, kw_only=True)
class PointFilter:
    """Says which points are upsampled, by their attributes `classification` and `withheld`.

    Raises ConfigError for numbers that are no classes.
    """

    classes: tuple[int, ...] | None = None
    """Only points of these classes; None stands for all but noise."""
    include_noise: bool = False
    """Withheld points and noise, too."""

    def __post_init__(self) -> None:
        if self.classes is not None and not self.classes:
            raise ConfigError("classes: name at least one, or leave them out")
        for number in self.classes or ():
            if not 0 <= number <= 255:
                raise ConfigError(f"class {number}: must be between 0 and 255")

    def __call__(self, cloud: PointCloud) -> np.ndarray:
        """(N,) bool, which points of a cloud are upsampled.

        A class that was asked for is, also if it is one of noise; a point that is withheld only
        with `include_noise`. Raises DataError when classes are asked for that the cloud has not.
        """
        taken = np.ones(len(cloud), bool)
        classes = attribute(cloud, CLASSIFICATION)
        if self.classes is not None:
            if classes is None:
                raise DataError("has no attribute `classification` to choose classes by")
            taken &= np.isin(classes, self.classes)
        elif classes is not None and not self.include_noise:
            taken &= ~np.isin(classes, NOISE_CLASSES)
        withheld = attribute(cloud, WITHHELD)
        if withheld is not None and not self.include_noise:
            taken &= withheld == 0
        return taken


def attribute(cloud: PointCloud, name: str) -> np.ndarray | None:
    """An attribute (N,) of one value a point, in whatever case its name is written."""
    for known, values in cloud.attributes.items():
        if known.lower() == name and values.ndim == 1:
            return values
    return None
