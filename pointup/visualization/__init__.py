"""Pictures of point clouds: before and after, prediction and error, statistics of a dataset.

Pictures are (height, width, 3) uint8 and deterministic. They need neither a GPU nor a display.
"""

from pointup.visualization.comparisons import before_after_picture, evaluation_picture
from pointup.visualization.dataset import dataset_picture
from pointup.visualization.page import save_picture

__all__ = ["before_after_picture", "dataset_picture", "evaluation_picture", "save_picture"]
