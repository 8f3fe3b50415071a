"""Interactive viewer of point clouds: one HTML file that works offline, without a server."""

from pointup.visualization.viewer.document import (
    check_viewer_path,
    write_before_after,
    write_viewer,
)
from pointup.visualization.viewer.scenes import (
    Channel,
    Layer,
    Scene,
    compare_with_reference,
    error_channel,
    read_layer,
    scene_of_files,
)

__all__ = [
    "Channel",
    "Layer",
    "Scene",
    "check_viewer_path",
    "compare_with_reference",
    "error_channel",
    "read_layer",
    "scene_of_files",
    "write_before_after",
    "write_viewer",
]
