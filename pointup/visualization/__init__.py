"""Pictures of point clouds: before and after, columns of clouds beside a reference, maps, datasets.

Pictures are (height, width, 3) uint8 and deterministic. They need neither a GPU nor a display.
"""
