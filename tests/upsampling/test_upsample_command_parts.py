"""`pointup upsample` on parts of a survey: bounds and shards."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import laspy
import numpy as np
import pytest
from copc_files import write_copc
from scipy.spatial import cKDTree
from survey_files import CORNER, WIDTH, rows, surface, upsample, write_las, write_model, write_row

from pointup.cli.upsample import plan
from pointup.cli.upsample.files import NOT_WRITTEN
from pointup.io.files import read_points


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def tiles(tmp_path) -> Path:
    return write_row(tmp_path / "tiles")


def test_bounds_of_a_copc_file_give_its_points_inside_and_as_many_new_ones_as_the_whole(
    tmp_path, model, monkeypatch
):
    monkeypatch.setattr(plan, "MARGIN", 12.0)
    write_copc(tmp_path / "a.copc.laz", surface(6000, 1), node_points=60)
    bounds = (500_050, 4_000_010, 500_060, 4_000_020)
    read, real = [], __import__("lazrs").decompress_points_with_chunk_table

    def counted(chunks: bytes, *rest: object) -> None:
        read.append(len(chunks))
        real(chunks, *rest)

    monkeypatch.setattr("lazrs.decompress_points_with_chunk_table", counted)
    words = (tmp_path / "a.copc.laz", "-o")
    assert upsample(model, *words, tmp_path / "part.las", "--bounds", *bounds) == 0
    # Twice with the margin, once for the originals.
    assert read and max(read) < 0.4 * (tmp_path / "a.copc.laz").stat().st_size
    assert upsample(model, *words, tmp_path / "whole.las") == 0
    part, whole = rows(tmp_path / "part.las"), rows(tmp_path / "whole.las")
    originals = rows(tmp_path / "a.copc.laz")
    xy = np.array(sorted(part))[:, :2]
    assert (xy >= bounds[:2]).all() and (xy < bounds[2:]).all()
    inside = {
        p for p in whole if all(np.array(p[:2]) >= bounds[:2]) and all(p[:2] < np.array(bounds[2:]))
    }
    assert part & originals == inside & originals
    assert len(part) == pytest.approx(len(inside), rel=0.05)
    # Boxes begin at the lowest point that is read: other new points than those of the whole.
    assert not (part - originals) & originals and len(part - originals) > 50


def test_points_in_are_those_within_the_bounds_and_those_around_them_are_named(
    tiles, tmp_path, model, capsys
):
    low, high = np.array([500_030, 4_000_005]), np.array([500_050, 4_000_015])
    assert upsample(model, tiles, "-o", tmp_path / "out", "--bounds", *low, *high) == 0
    text = capsys.readouterr().out  # The margin of 64 spacings holds both files.
    for name in ("0.las", "1.las"):
        xy = read_points(tiles / name).positions[:, :2]
        inside = ((xy >= low) & (xy < high)).all(axis=1).sum()
        assert f"{name}: {inside} points in, {len(xy) - inside} read around them, " in text


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("--bounds", 500_030, 4_000_005, 500_050, 4_000_015), ["0.las", "1.las"]),
        (("--bounds", 500_041, 4_000_005, 500_070, 4_000_015, "--shard", "1/3"), ["0.las"]),
        (("--shard", "2/3"), ["1.las"]),
    ],
)
def test_the_summary_is_of_the_new_points_that_are_written_and_counts_those_of_buffers_once(
    words, names, tmp_path, model, capsys
):
    points, made, out = surface(1200, 0), set[tuple[float, ...]](), tmp_path / "out"
    (tmp_path / "tiles").mkdir()
    for i in range(3):
        from_middle = points[:, 0] - CORNER[0] - (i + 0.5) * WIDTH
        write_las(tmp_path / "tiles" / f"{i}.las", points[abs(from_middle) < WIDTH / 2 + 8])
    assert upsample(model, tmp_path / "tiles", "-o", out, *words) == 0
    text = capsys.readouterr().out
    assert sorted(path.name for path in out.glob("*.las")) == names
    num_written = 0
    for name in names:
        las = laspy.read(out / name)
        new = np.column_stack([las.xyz, las.distance_to_measured])[np.asarray(las.synthetic) == 1]
        made |= set(map(tuple, new.tolist()))
        num_written += len(new)
    assert (len(made) < num_written) == (len(names) > 1)
    farthest = max(distance for *_, distance in made)
    summary = re.search(
        r"survey of 3 files: .* ([\d,]+) new, .*\n.* at most (\S+) from .* most (\S+), none beyond",
        text,
    )
    assert summary
    assert summary.groups()[:2] == (f"{len(made):,}", f"{farthest:.3g}")
    within = np.quantile([distance for *_, distance in made], 0.999, method="inverted_cdf")
    assert abs(float(summary[3]) / within - 1) < 0.01


def test_parents_within_bounds_are_numbered_as_in_the_output(tmp_path, model):
    write_las(tmp_path / "in.las", surface(3000, 1))
    bounds = (500_050, 4_000_010, 500_070, 4_000_030)
    out = tmp_path / "part.las"
    assert upsample(model, tmp_path / "in.las", "-o", out, "--bounds", *bounds) == 0
    made = laspy.read(out)
    is_new, parent = np.asarray(made.synthetic) == 1, np.asarray(made.parent_index)
    measured = made.xyz[~is_new]
    is_outside = parent[is_new] == NOT_WRITTEN
    assert 0 < is_outside.sum() < 0.3 * is_new.sum()
    away = np.linalg.norm(made.xyz[is_new] - measured[parent[is_new] % len(measured)], axis=1)
    spacing = np.median(cKDTree(measured).query(measured, k=2)[0][:, 1])
    assert np.median(away[~is_outside]) < 2 * spacing
    assert (away[~is_outside] < 8 * spacing).all()


def test_no_note_compares_the_classes_of_points_around_the_bounds(tmp_path, model, capsys):
    points = surface(3000, 1)
    is_outside = points[:, 0] > 500_070
    write_las(tmp_path / "in.las", points, classification=np.where(is_outside, 2, 6))
    bounds = (500_050, 4_000_010, 500_060, 4_000_020)
    options = (tmp_path / "in.las", "-o", tmp_path / "part.las", "--above-ground")
    assert upsample(model, *options, "--bounds", *bounds) == 0
    made = laspy.read(tmp_path / "part.las")
    assert set(np.asarray(made.classification)) == {6}
    assert "read around them" in (text := capsys.readouterr().out)
    assert "of the measured and" not in text


def test_bounds_leave_out_files_outside_and_read_those_near(tiles, tmp_path, model, capsys):
    bounds = (500_002, 4_000_000, 500_039, 4_000_020)
    assert upsample(model, tiles, "-o", tmp_path / "out", "--bounds", *bounds) == 0
    assert [p.name for p in sorted((tmp_path / "out").glob("*.las"))] == ["0.las"]
    assert "1 file written:" in capsys.readouterr().out
    assert upsample(model, tiles, "-o", tmp_path / "out", "--bounds", 0, 0, 1, 1) == 1
    assert "the files span x 500000" in capsys.readouterr().err
    assert upsample(model, tiles, "-o", tmp_path / "out", "--bounds", 2, 0, 1, 1) == 1
    assert "XMIN below XMAX" in capsys.readouterr().err
    swapped = (500_002, 4_000_020.5, 500_039, 4_000_000)
    assert upsample(model, tiles, "-o", tmp_path / "out", "--bounds", *swapped) == 1
    assert "--bounds 500002 4000020.5 500039 4000000: " in capsys.readouterr().err


def test_a_file_that_touches_the_bounds_without_a_point_inside_is_skipped_with_a_note(
    tiles, tmp_path, model, capsys
):
    points = surface(400, 1, WIDTH) + np.array([WIDTH, 0, 0])
    # The corner at the lower left is empty, and the extent of the file holds it.
    in_corner = (points[:, :2] < CORNER[:2] + np.array([WIDTH + 15, 15])).all(axis=1)
    write_las(tiles / "1.las", points[~in_corner])
    bounds = (500_030, 4_000_000, 500_050, 4_000_010)
    out = tmp_path / "out"
    assert upsample(model, tiles, "-o", out, "--bounds", *bounds) == 0
    assert [p.name for p in out.glob("*.las")] == ["0.las"]
    note = f"note: {tiles / '1.las'}: no points within --bounds, skipped\n"
    assert capsys.readouterr().err == note
    assert upsample(model, tiles, "-o", out, "--bounds", *bounds) == 0
    assert "0 files written, 1 skipped" in capsys.readouterr().out

    empty = (500_041, 4_000_001, 500_050, 4_000_010)
    for source in (tiles, tiles / "1.las"):
        assert upsample(model, source, "-o", tmp_path / "none", "--bounds", *empty) == 1
        text = capsys.readouterr().err
        assert "no file has points within --bounds" in text and text.count("\n") == 1
    assert not (tmp_path / "none").exists()


def test_shards_write_each_file_once_and_use_the_files_that_border_on_theirs(
    tiles, tmp_path, model, capsys
):
    assert upsample(model, tiles, "-o", tmp_path / "whole") == 0
    capsys.readouterr()
    seen: list[set[str]] = []
    for k in (1, 2, 3):
        assert upsample(model, tiles, "-o", tmp_path / "out", "--shard", f"{k}/3") == 0
        seen.append({p.name for p in (tmp_path / "out").glob("*.las")})
    assert [len(names) for names in seen] == [1, 2, 3]
    own = re.findall(r"survey of \d files: (\d+) points in, ", capsys.readouterr().out)
    assert sum(map(int, own)) == sum(len(rows(tiles / f"{i}.las")) for i in range(3))
    for i in range(3):
        name = f"{i}.las"
        sharded, at_once = rows(tmp_path / "out" / name), rows(tmp_path / "whole" / name)
        assert rows(tiles / name) <= sharded
        assert len(sharded) == pytest.approx(len(at_once), rel=0.03)
        assert len(sharded & at_once) > 0.8 * len(at_once)


def test_shards_of_subfolders_need_no_folder_of_the_files_that_are_only_read(
    tiles, tmp_path, model
):
    for i in range(3):
        (tiles / f"sub{i}").mkdir()
        (tiles / f"{i}.las").rename(tiles / f"sub{i}" / f"{i}.las")
    for k in (3, 2, 1):
        assert upsample(model, tiles, "-o", tmp_path / "out", "--shard", f"{k}/3") == 0
    written = [p.relative_to(tmp_path / "out") for p in (tmp_path / "out").rglob("*.las")]
    assert sorted(map(str, written)) == ["sub0/0.las", "sub1/1.las", "sub2/2.las"]


def test_a_shard_without_a_file_says_so(tiles, tmp_path, model, capsys):
    assert upsample(model, tiles / "0.las", "-o", tmp_path / "a.las", "--shard", "1/2") == 0
    assert not (tmp_path / "a.las").exists()
    assert "--shard 1/2: has no file to write" in capsys.readouterr().err


def test_a_shard_whose_own_files_are_damaged_reports_them_and_ends(tiles, tmp_path, model, capsys):
    content = bytearray((tiles / "2.las").read_bytes())
    # The header gives x from 80 to 81 m, and the points span 40 m.
    struct.pack_into("<2d", content, 179, CORNER[0] + 81, CORNER[0] + 80)
    (tiles / "2.las").write_bytes(content)
    assert upsample(model, tiles, "-o", tmp_path / "out", "--shard", "3/3") == 1
    assert "2.las: has points outside of the extent" in capsys.readouterr().err


def test_a_shard_made_without_a_damaged_neighbour_is_made_again_by_the_same_command(
    tiles, tmp_path, model, capsys
):
    content = bytearray((tiles / "1.las").read_bytes())
    struct.pack_into("<2d", content, 179, CORNER[0] + 41, CORNER[0] + 40)
    (tiles / "1.las").write_bytes(content)
    for _ in range(2):
        assert upsample(model, tiles, "-o", tmp_path / "out", "--shard", "1/3") == 1
        assert "1.las: has points outside of the extent" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").glob("*.las")] == ["0.las"]


def test_a_file_that_is_cut_short_is_an_error_of_the_first_shard_alone(
    tiles, tmp_path, model, capsys
):
    (tiles / "3.las").write_bytes((tiles / "2.las").read_bytes()[:2000])
    out = tmp_path / "out"
    status = [upsample(model, tiles, "-o", out, "--shard", f"{k}/2") for k in (1, 2)]
    assert status == [1, 0]
    assert capsys.readouterr().err.count("3.las: not a whole LAS/LAZ file") == 1
    assert sorted(path.name for path in out.glob("*.las")) == ["0.las", "1.las", "2.las"]
