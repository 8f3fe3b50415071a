"""Pictures of point clouds: before and after, columns of clouds beside a reference, maps, datasets.

Pictures are (height, width, 3) uint8 and deterministic. They need neither a GPU nor a display.
"""

from pointup.visualization.before_after import before_after_picture

__all__ = ["before_after_picture"]
