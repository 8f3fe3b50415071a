"""Pictures for people: before and after, an evaluation at a glance, the make-up of a dataset.

Every picture is (height, width, 3) uint8 and deterministic; none needs a GPU or a display.
"""

from pointup.visualization.comparisons import before_after_picture, evaluation_picture
from pointup.visualization.dataset import dataset_picture
from pointup.visualization.page import save_picture

__all__ = ["before_after_picture", "dataset_picture", "evaluation_picture", "save_picture"]
