"""Interactive viewer of point clouds: one HTML file that works offline, without a server."""

from pointup.visualization.viewer.document import write_viewer
from pointup.visualization.viewer.scenes import Channel, Layer, Scene

__all__ = ["Channel", "Layer", "Scene", "write_viewer"]
