"""GeoTIFFs of ground, canopy and density, to look at in a GIS."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pointup.disk import check_output_folder, os_errors, written_whole
from pointup.errors import DataError, FileError
from pointup.evaluation.common_extent import MOST_CELLS, Extent

if TYPE_CHECKING:
    from pyproj import CRS

NO_DATA = -9999.0


def check_rasters(folder: Path) -> None:
    """Raise FileError unless rasters can be written to a folder. Call it before the work."""
    if find_spec("rasterio") is None:
        raise FileError(f"{folder}: needs rasterio; install it with `pip install pointup[rasters]`")
    check_output_folder(folder)


def aligned_cells(low: np.ndarray, high: np.ndarray, cell: float) -> Extent:
    """Cells over a box (2,), (2,), whose corners are multiples of the cell: those of other boxes
    are cells of the same grid. Raises DataError for too many."""
    first, last = np.floor(low / cell), np.floor(high / cell)
    shape = last - first + 1
    if shape.prod() > MOST_CELLS:
        raise DataError(
            f"{shape.prod():.2g} cells of {cell:g} are too many for a raster; are the coordinates "
            "in metres, without stray points?"
        )
    return Extent(cell, first * cell, np.broadcast_to(True, shape.astype(int)))


def write_rasters(
    stem: Path, chunks: Iterable[np.ndarray], extent: Extent, system: CRS | None
) -> None:
    """Write STEM_ground.tif, STEM_canopy.tif and STEM_density.tif of points (N, 3) in chunks.

    The ground is the lowest point of each cell, the canopy the highest, and the density the points
    per square unit. Cells off the extent have no data, and those without points no heights. Raises
    FileError if they can't be written.
    """
    width, height = extent.covered.shape
    # As in the files, to hold no copies of large grids: rounded heights keep their order.
    ground, canopy = np.full((2, width * height), np.nan, dtype=np.float32)
    density = np.zeros(width * height, dtype=np.float32)
    for points in chunks:
        place = extent.place(points)
        heights = points[place >= 0, 2].astype(np.float32)
        column, row = np.divmod(place[place >= 0], height)
        # The first row of a picture is the northernmost.
        place = (height - 1 - row) * width + column
        np.fmin.at(ground, place, heights)
        np.fmax.at(canopy, place, heights)
        np.add.at(density, place, np.float32(1))
    density /= extent.cell**2
    density[~extent.covered.T[::-1].reshape(-1)] = np.nan
    for name, grid in (("ground", ground), ("canopy", canopy), ("density", density)):
        if name == "density" and system is not None and system.sub_crs_list:
            # GDAL takes the unit of heights for that of the values.
            system = system.sub_crs_list[0]
        _write(stem.with_name(f"{stem.name}_{name}.tif"), grid, extent, system)


def _write(path: Path, grid: np.ndarray, extent: Extent, system: CRS | None) -> None:
    import rasterio
    from rasterio.transform import from_origin

    width, height = extent.covered.shape
    grid[np.isnan(grid)] = NO_DATA
    left, bottom = extent.origin
    top = bottom + height * extent.cell
    with os_errors(path, "written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        # GDAL writes on close and does not say that a disk is full, so that Python writes the file.
        with rasterio.MemoryFile() as memory, written_whole(path) as part:
            with memory.open(
                driver="GTiff",
                width=width,
                height=height,
                count=1,
                dtype="float32",
                nodata=NO_DATA,
                compress="deflate",
                crs=None if system is None else system.to_wkt(),
                transform=from_origin(left, top, extent.cell, extent.cell),
            ) as raster:
                raster.write(grid.reshape(1, height, width))
            part.write_bytes(memory.getbuffer())
