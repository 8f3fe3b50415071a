"""Pictures of point clouds: before and after, columns of clouds beside a reference, maps, datasets.

Pictures are (height, width, 3) uint8 and deterministic. They need neither a GPU nor a display.
"""

from pointup.visualization.before_after import before_after_picture
from pointup.visualization.columns import columns_picture, evaluation_picture, maps_picture
from pointup.visualization.page import (
    check_picture_path,
    dataset_picture,
    reliability_picture,
    save_picture,
    stacked,
)

__all__ = [
    "before_after_picture",
    "check_picture_path",
    "columns_picture",
    "dataset_picture",
    "evaluation_picture",
    "maps_picture",
    "reliability_picture",
    "save_picture",
    "stacked",
]
