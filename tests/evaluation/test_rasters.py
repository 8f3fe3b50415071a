"""GeoTIFFs of surveys: their values, their grid, and what gdalinfo of GDAL says of them."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import tracemalloc
from pathlib import Path
from typing import Any

import laspy
import numpy as np
import pytest
from survey_files import write_las

from pointup.cli.main import main
from pointup.errors import DataError, FileError
from pointup.evaluation.rasters import aligned_cells, check_rasters, write_rasters

rasterio = pytest.importorskip("rasterio")
NO_DATA = -9999


def scene(width: float = 20.0, first: float = 0.0) -> np.ndarray:
    """A survey in UTM with a hole."""
    xy = np.random.default_rng(0).random((1500, 2)) * [width, 12.0] + [500_000.3 + first, 4e6 + 0.3]
    z = 100 + 5 * np.random.default_rng(1).random(1500)
    points = np.column_stack([xy, z]).round(3)
    return points[np.linalg.norm(xy - [500_006, 4_000_006], axis=1) > 3]


def grids(stem: Path) -> dict[str, Any]:
    """The open rasters with this stem."""
    names = ("ground", "canopy", "density")
    return {name: rasterio.open(stem.with_name(f"{stem.name}_{name}.tif")) for name in names}


def expected(points: np.ndarray, raster: Any) -> dict[str, np.ndarray]:
    """The values of each cell of a raster by a loop over the cells."""
    found = {name: np.full(raster.shape, NO_DATA, float) for name in ("ground", "canopy")}
    found["density"] = np.zeros(raster.shape)
    left, bottom, (side, _) = raster.bounds.left, raster.bounds.bottom, raster.res
    columns = np.floor((points[:, 0] - left) / side).astype(int)
    # A point on a border belongs to the cell above it.
    rows = raster.height - 1 - np.floor((points[:, 1] - bottom) / side).astype(int)
    for cell in set(zip(rows.tolist(), columns.tolist(), strict=True)):
        if min(cell) < 0 or cell[0] >= raster.height or cell[1] >= raster.width:
            continue
        inside = points[(rows == cell[0]) & (columns == cell[1]), 2]
        found["ground"][cell], found["canopy"][cell] = inside.min(), inside.max()
        found["density"][cell] = len(inside) / side**2
    return found


def test_each_cell_has_its_lowest_and_highest_point_and_its_density(tmp_path):
    points = scene()
    cells = aligned_cells(points[:, :2].min(axis=0), points[:, :2].max(axis=0), 2.0)
    write_rasters(tmp_path / "new" / "all", np.array_split(points, 3), cells, None)
    rasters = grids(tmp_path / "new" / "all")
    for name, values in expected(points, rasters["ground"]).items():
        raster = rasters[name]
        np.testing.assert_allclose(raster.read(1), values, rtol=1e-6)
        assert raster.crs is None and raster.res == (2.0, 2.0)
        assert raster.transform.c % 2 == 0 and raster.transform.f % 2 == 0
    assert (rasters["ground"].read(1) == NO_DATA).any(), "no hole"
    with pytest.raises(DataError, match="too many for a raster"):
        aligned_cells(np.zeros(2), np.full(2, 1e6), 1.0)


def test_upsample_writes_rasters_before_and_after_on_one_grid(tmp_path, command):
    # The border, at 500,020.3, is in a cell of both files; the second has points of the first.
    whole = np.concatenate([scene(), scene(first=20.0)])
    for i, low in ((0, 500_000), (1, 500_017.3)):
        part = whole[(whole[:, 0] >= low) & (whole[:, 0] < 500_020.3 + 20 * i)]
        write_las(tmp_path / "in" / f"{i}.las", part, system=32632)
    words = (tmp_path / "in", "-o", tmp_path / "out", "--ratio", "2")
    assert command(*words, "--rasters", tmp_path / "tif").status == 0
    assert len(list((tmp_path / "tif").iterdir())) == 12
    corners = []
    for i in range(2):
        before, after = (grids(tmp_path / "tif" / f"{i}_{side}") for side in ("before", "after"))
        inside = np.ones((before["ground"].height, before["ground"].width), bool)
        # The outermost cells on this side belong to the other file as well.
        inside[:, : 1 if i else 0] = False
        for name, values in expected(whole, before["ground"]).items():
            np.testing.assert_allclose(before[name].read(1)[inside], values[inside], rtol=1e-6)
            assert before[name].transform == after[name].transform
            assert before[name].crs.to_epsg() == 32632 and before[name].nodata == NO_DATA
        assert 1.9 < after["density"].read(1).sum() / before["density"].read(1).sum() < 2.1
        known = before["ground"].read(1) != NO_DATA
        assert (after["ground"].read(1)[known] <= before["ground"].read(1)[known]).all()
        corners.append(before["ground"].transform.c)
    assert (corners[1] - corners[0]) % 1 == 0
    # New points only in the files: the rasters are the same.
    words = (tmp_path / "in", "-o", tmp_path / "new", "--ratio", "2", "--only-new")
    assert command(*words, "--rasters", tmp_path / "again").status == 0
    for path in (tmp_path / "tif").iterdir():
        with rasterio.open(path) as one, rasterio.open(tmp_path / "again" / path.name) as other:
            np.testing.assert_array_equal(one.read(1), other.read(1))


def test_cells_at_a_seam_have_the_new_points_of_both_files(tmp_path, command):
    whole = scene(width=40.0)
    for i, side in enumerate((whole[:, 0] < 500_020.3, whole[:, 0] >= 500_020.3)):
        write_las(tmp_path / "in" / f"{i}.las", whole[side], system=32632)
    words = (tmp_path / "in", "-o", tmp_path / "out", "--ratio", "4")
    assert command(*words, "--rasters", tmp_path / "tif").status == 0
    outputs = [laspy.read(tmp_path / "out" / f"{i}.las").xyz for i in range(2)]
    assert outputs[0][:, 0].max() > 500_020.3, "no new point beyond the seam"
    for i in range(2):
        after = grids(tmp_path / "tif" / f"{i}_after")
        for name, values in expected(np.concatenate(outputs), after["ground"]).items():
            np.testing.assert_allclose(after[name].read(1), values, rtol=1e-6)


def test_a_point_in_the_buffers_of_several_tiles_counts_once_in_each_cell(tmp_path, command):
    whole = scene(width=40.0)
    # The cells at the border of the first tile are in both other ones.
    for i, low in enumerate((500_000.0, 500_010.0, 500_018.0)):
        part = whole[(whole[:, 0] >= low) & (whole[:, 0] <= low + 20.4)]
        write_las(tmp_path / "in" / f"{i}.las", part, system=32632)
    words = (tmp_path / "in", "-o", tmp_path / "out", "--ratio", "4")
    assert command(*words, "--rasters", tmp_path / "tif").status == 0
    for side, folder in {"before": "in", "after": "out"}.items():
        files = [laspy.read(tmp_path / folder / f"{i}.las").xyz for i in range(3)]
        points = np.unique(np.concatenate(files).round(6), axis=0)
        for i in range(3):
            rasters = grids(tmp_path / "tif" / f"{i}_{side}")
            for name, values in expected(points, rasters["ground"]).items():
                np.testing.assert_allclose(rasters[name].read(1), values, rtol=1e-6)


def test_rasters_cover_the_bounds_only(tmp_path, command):
    stray = np.concatenate([scene(), [[520_000.0, 4_020_000.0, 100.0]]])
    write_las(tmp_path / "a.las", stray)
    words = (tmp_path / "a.las", "-o", tmp_path / "b.las", "--ratio", "2")
    bounds = ("--bounds", "500002", "4000002", "500008", "4000010")
    assert command(*words, *bounds, "--rasters", tmp_path / "tif").status == 0
    after = grids(tmp_path / "tif" / "b_after")["density"]
    assert after.width <= 8 and after.height <= 10
    assert (after.read(1) > 0).sum() > 0.4 * after.width * after.height


def test_cells_are_a_metre_wide_where_x_and_y_are_in_feet_and_heights_in_metres(tmp_path, command):
    write_las(tmp_path / "a.las", scene(), system="EPSG:2994+5703")
    words = (tmp_path / "a.las", "-o", tmp_path / "b.las", "--ratio", "2")
    assert command(*words, "--rasters", tmp_path / "tif").status == 0
    for raster in grids(tmp_path / "tif" / "b_after").values():
        assert raster.res == pytest.approx((1 / 0.3048, 1 / 0.3048))


def test_what_a_call_with_other_options_left_has_no_rasters(tmp_path, command):
    write_las(tmp_path / "in" / "a.las", scene())
    points = scene(first=9000.0)
    write_las(tmp_path / "in" / "noise.las", points, classification=np.full(len(points), 7))
    words = (tmp_path / "in", "-o", tmp_path / "out", "--ratio", "2")
    assert command(*words).status == 0
    assert command(*words, "--only-new", "--rasters", tmp_path / "tif").status == 0
    assert (tmp_path / "out" / "noise.las").exists()
    assert {path.name[:2] for path in (tmp_path / "tif").iterdir()} == {"a_"}


def test_files_of_one_name_and_other_extensions_have_rasters_each(tmp_path, command):
    for number, name in enumerate(("a.las", "a.laz", "b.las")):
        write_las(tmp_path / "in" / name, scene(first=9000.0 * number))
    words = (tmp_path / "in", "-o", tmp_path / "out", "--ratio", "2")
    assert command(*words, "--rasters", tmp_path / "tif").status == 0
    names = sorted(path.name for path in (tmp_path / "tif").glob("*_after_ground.tif"))
    assert names == [f"{name}_after_ground.tif" for name in ("a.las", "a.laz", "b")]


def test_a_file_that_has_no_rasters_is_named_and_the_others_have_some(tmp_path, command):
    for number, name in enumerate("ab"):
        write_las(tmp_path / "in" / f"{name}.las", scene(first=9000.0 * number))
    stray = np.concatenate([scene(), [[520_000.0, 4_020_000.0, 100.0]]])
    write_las(tmp_path / "in" / "stray.las", stray)
    words = (tmp_path / "in", "-o", tmp_path / "out", "--ratio", "2", "--separate")
    result = command(*words, "--rasters", tmp_path / "tif")
    assert result.status == 1
    assert f"error: {tmp_path / 'in' / 'stray.las'}: 4e+08 cells" in result.err
    assert f"{tmp_path / 'tif'}: ground, canopy and density of 2 files" in result.out
    assert "out.vpc: a virtual point cloud of 3 files" in result.out
    assert "3 files written, 1 error" in result.out
    assert {path.name[0] for path in (tmp_path / "tif").iterdir()} == {"a", "b"}


def test_the_files_beside_an_unreadable_one_have_rasters_and_a_page(tmp_path, command):
    for number, name in enumerate("ab"):
        write_las(tmp_path / "in" / f"{name}.las", scene(first=20.0 * number))
    (tmp_path / "in" / "cut.las").write_bytes((tmp_path / "in" / "a.las").read_bytes()[:9000])
    words = (tmp_path / "in", "-o", tmp_path / "out", "--ratio", "2")
    shown = ("--rasters", tmp_path / "tif", "--view", tmp_path / "page.html")
    result = command(*words, *shown)
    assert result.status == 1 and "cut.las: not a whole LAS/LAZ file" in result.err
    assert len(list((tmp_path / "tif").iterdir())) == 12 and (tmp_path / "page.html").exists()


def test_evaluate_writes_rasters_of_source_prediction_and_reference(tmp_path):
    points = scene()
    files = {"source": points[::3], "prediction": points[::2], "reference": points}
    words = ["evaluate", "lidar", "--rasters", str(tmp_path / "tif"), "--cell", "2"]
    for name, of_file in files.items():
        words += [f"--{name}", str(write_las(tmp_path / f"{name}.las", of_file, system=32632))]
    assert main(words) == 0
    known = grids(tmp_path / "tif" / "reference")["density"].read(1) != NO_DATA
    for name, of_file in files.items():
        rasters = grids(tmp_path / "tif" / name)
        inside = rasters["density"].read(1)
        values = expected(of_file, rasters["density"])["density"]
        np.testing.assert_allclose(inside[known], values[known])
        assert (inside[~known] == NO_DATA).all()


def test_evaluate_gives_rasters_the_system_of_the_first_file_that_names_one(tmp_path):
    words = ["evaluate", "lidar", "--rasters", str(tmp_path / "tif")]
    for name, system in {"reference": None, "prediction": 32632}.items():
        words += [f"--{name}", str(write_las(tmp_path / f"{name}.las", scene(), system=system))]
    assert main(words) == 0
    assert {r.crs.to_epsg() for r in grids(tmp_path / "tif" / "reference").values()} == {32632}


def test_heights_have_the_unit_of_a_system_with_heights_and_densities_do_not(tmp_path):
    import pyproj

    cells = aligned_cells(np.array([500_000.5, 4e6]), np.array([500_010.5, 4e6 + 5]), 1.0)
    write_rasters(tmp_path / "a", [scene()], cells, pyproj.CRS("EPSG:25832+7837"))
    units = {name: raster.units for name, raster in grids(tmp_path / "a").items()}
    assert units == {"ground": ("metre",), "canopy": ("metre",), "density": (None,)}


@pytest.mark.skipif(shutil.which("gdalinfo") is None, reason="no gdalinfo (apt install gdal-bin)")
def test_gdalinfo_finds_system_grid_and_no_data(tmp_path):
    import pyproj

    cells = aligned_cells(np.array([500_000.5, 4e6]), np.array([500_010.5, 4e6 + 5]), 1.0)
    write_rasters(tmp_path / "a", [scene()], cells, pyproj.CRS("EPSG:25832+7837"))
    said = subprocess.run(
        ["gdalinfo", "-json", str(tmp_path / "a_canopy.tif")], capture_output=True, check=True
    )
    found = json.loads(said.stdout)
    assert found["size"] == [11, 6] and found["bands"][0]["noDataValue"] == NO_DATA
    assert found["geoTransform"] == [500_000, 1, 0, 4_000_006, 0, -1]
    assert "ETRS89 / UTM zone 32N" in found["coordinateSystem"]["wkt"]
    assert [path.name for path in tmp_path.glob("*xml")] == []


def test_rasters_take_at_most_16_bytes_of_memory_a_cell(tmp_path):
    cells = aligned_cells(np.zeros(2), np.full(2, 1999.0), 1.0)
    tracemalloc.start()
    try:
        write_rasters(tmp_path / "a", [np.array([[3.0, 4.0, 5.0]])] * 2, cells, None)
        assert tracemalloc.get_traced_memory()[1] < 16 * cells.covered.size
    finally:
        tracemalloc.stop()


def test_a_full_disk_is_an_error_and_leaves_the_older_raster(tmp_path):
    points = scene(200.0)
    cells = aligned_cells(points[:, :2].min(axis=0), points[:, :2].max(axis=0), 1.0)
    (tmp_path / "a_ground.tif").write_bytes(b"older")
    least, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, most))
    try:
        with pytest.raises(FileError, match=r"a_ground\.tif: can't be written: File too large"):
            write_rasters(tmp_path / "a", [points], cells, None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (least, most))
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"older"]


def test_rasters_that_cannot_be_written_are_refused_before_the_work(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match="is a file"):
        check_rasters(tmp_path / "file")
    monkeypatch.setattr("pointup.evaluation.rasters.find_spec", lambda name: None)
    with pytest.raises(FileError, match=r"needs rasterio; install it with .*rasters"):
        check_rasters(tmp_path / "new")
