"""`pointup prepare` on large surveys: by regions, continued where it stopped, in shards."""

from __future__ import annotations

import filecmp
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import laspy
import numpy as np
import pytest
from datasets import load_from_disk
from survey_files import write_las

from pointup.cli.main import main
from pointup.datasets import block_pairs, pair_writer, regions, survey_tiles
from pointup.datasets.opening import open_samples
from pointup.datasets.pair_writer import read_part
from pointup.datasets.regions import is_held_out
from pointup.errors import FileError

WIDTH = 50.0


@pytest.fixture(autouse=True, scope="module")
def small_regions() -> Iterator[None]:
    with mock.patch.multiple(regions, LARGE_BYTES=0, POINTS_PER_REGION=1500):
        yield


@pytest.fixture(scope="module")
def surveys(tmp_path_factory) -> Path:
    """dense/ and sparse/ of 3 x 3 tiles of 50 m, with 2,000 and 600 points each."""
    folder, rng = tmp_path_factory.mktemp("surveys"), np.random.default_rng(0)
    for name, number in (("dense", 2000), ("sparse", 600)):
        for i in range(9):
            corner = np.array([500_000 + i // 3 * WIDTH, 4_000_000 + i % 3 * WIDTH, 0])
            points = corner + rng.random((number, 3)) * [WIDTH - 0.01, WIDTH - 0.01, 2]
            write_las(folder / name / f"{i}.las", points)
    return folder


def prepare(surveys: Path, output: Path, *more: object) -> int:
    words = ("prepare", "pairs", "--source", surveys / "sparse", "--target", surveys / "dense",
             "--tile", 5, "--block", 2, "--min-points", 2, "--num-workers", 1, "-o", output,
             *more)  # fmt: skip
    return main([str(word) for word in words])


def thin(surveys: Path, output: Path, *more: object) -> int:
    words = ("prepare", "thin", surveys / "dense", "--ratio", 3, "--pattern", "mixed", "--tile", 10,
             "--block", 2, "--min-points", 2, "--num-workers", 1, "-o", output, *more)  # fmt: skip
    return main([str(word) for word in words])


@pytest.fixture(scope="module")
def undisturbed(surveys, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "undisturbed"
    assert prepare(surveys, folder) == 0
    return folder


def same_files(one: Path, other: Path) -> bool:
    names = [{p.relative_to(f) for p in f.rglob("*") if p.is_file()} for f in (one, other)]
    return names[0] == names[1] and all(
        filecmp.cmp(one / name, other / name, shallow=False) for name in names[0]
    )


def test_each_tile_is_a_pair_once_and_no_training_point_is_near_validation(undisturbed):
    info = json.loads((undisturbed / "pointup.json").read_text())
    assert info["regions"] > 4 and len(list((undisturbed / "train").glob("*.arrow"))) > 4
    held, names = [], []
    for split in ("train", "validation"):
        pairs = load_from_disk(undisturbed)[split]
        assert list(open_samples(undisturbed, split).names) == pairs["name"]
        tiles = np.array([name.split("_")[1:] for name in pairs["name"]], dtype=np.int64)
        held.append(is_held_out(tiles // 2, 0.1, 0))
        names += pairs["name"]
    assert not held[0].any() and held[1].all() and len(set(names)) == len(names)
    # 900 tiles of 5 m; each has about 6 points of the sparse survey.
    assert 700 < len(names) <= 900
    points, boxes = [], []
    for row in load_from_disk(undisturbed)["train"]:
        points.append(np.reshape(row["target"], (-1, 3)) + row["origin"])
    for name in load_from_disk(undisturbed)["validation"]["name"]:
        boxes.append(np.array(name.split("_")[1:], dtype=float) * 5)
    xy = np.concatenate(points)[:, :2]
    for low in boxes:
        beside = np.maximum(low - xy, xy - low - 5).clip(0)
        assert np.hypot(*beside.T).min() >= 2.5 - 1e-3


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]
)
def test_a_dense_plot_of_few_blocks_has_validation_pairs(seed, tmp_path):
    corner = np.array([500_003.0, 4_000_007.0, 0.0])
    plot = corner + np.random.default_rng(0).random((20_000, 3)) * [50, 50, 2]
    write_las(tmp_path / "plot.las", plot)
    words = ["prepare", "thin", tmp_path / "plot.las", "-o", tmp_path / "pairs", "--seed", seed]
    assert main([*map(str, words), "--num-workers", "1"]) == 0
    # 36 tiles of 10 m, some with a small part of the plot.
    sizes = [len(open_samples(tmp_path / "pairs", split)) for split in ("train", "validation")]
    assert sizes[1] >= 2 and sizes[0] >= 15


def test_an_interrupted_command_continues_to_the_same_bytes(
    surveys, undisturbed, tmp_path, monkeypatch, capsys
):
    output = tmp_path / "pairs"
    real, made = block_pairs.write_part, []

    def interrupted(folder: Path, *rest: object) -> None:
        made.append(folder)
        if len(made) in (3, 6):
            (folder.with_name(f"{folder.name}.half") / "train").mkdir(parents=True)
            raise KeyboardInterrupt
        real(folder, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(block_pairs, "write_part", interrupted)
    for _ in range(2):
        assert prepare(surveys, output) == 130
        assert "the same command continues" in capsys.readouterr().err
        assert not output.exists()
    assert prepare(surveys, output) == 0
    assert "continuing: 4 of" in capsys.readouterr().err
    assert same_files(output, undisturbed)
    assert not list(tmp_path.glob(".*")), "nothing is left"


def test_a_continued_command_reads_again_what_could_not_be_read(
    surveys, undisturbed, tmp_path, monkeypatch
):
    output = tmp_path / "pairs"
    real_points, real_part, made = survey_tiles.iter_points, block_pairs.write_part, []

    def lost(path: Path, **options: object) -> Iterator[object]:
        if path.name == "0.las":
            raise FileError(f"{path}: can't be read: Stale file handle")
        return real_points(path, **options)  # type: ignore[arg-type]

    def interrupted_part(folder: Path, *rest: object) -> None:
        made.append(folder)
        if len(made) == 3:
            raise KeyboardInterrupt
        real_part(folder, *rest)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(survey_tiles, "iter_points", lost)
        patch.setattr(block_pairs, "write_part", interrupted_part)
        assert prepare(surveys, output) == 130
    (parts,) = tmp_path.glob(".pairs-unfinished/parts")
    assert any(read_part(part).facts["left_out"] for part in parts.iterdir())
    assert prepare(surveys, output) == 0
    assert same_files(output, undisturbed)


def test_thinning_by_regions_gives_the_pairs_of_thinning_at_once(surveys, tmp_path, monkeypatch):
    assert thin(surveys, tmp_path / "regions", "--validation", 0) == 0
    assert json.loads((tmp_path / "regions" / "pointup.json").read_text())["regions"] > 4
    monkeypatch.setattr(regions, "LARGE_BYTES", 10**9)
    assert thin(surveys, tmp_path / "once", "--validation", 0) == 0
    # A dataset without validation pairs is split when it is opened.
    by_regions, at_once = (
        {row["name"]: row for split in load_from_disk(tmp_path / name).values() for row in split}
        for name in ("regions", "once")
    )
    # 15 x 15 tiles of 10 m with 80 points each.
    assert by_regions.keys() == at_once.keys() and len(at_once) == 225
    for name, row in at_once.items():
        for column, values in row.items():
            assert np.array_equal(values, by_regions[name][column]), (name, column)


def interrupted(*_: object) -> bool:
    raise KeyboardInterrupt


def test_a_command_that_is_killed_after_its_last_part_continues_unless_it_is_another(
    surveys, undisturbed, tmp_path, monkeypatch, capsys
):
    with monkeypatch.context() as patch:
        patch.setattr(pair_writer, "assemble", interrupted)
        assert prepare(surveys, tmp_path / "pairs") == 130
    capsys.readouterr()
    assert prepare(surveys, tmp_path / "pairs", "--seed", 1) == 1
    assert "differs in seed; delete it" in capsys.readouterr().err
    words = ["prepare", "default", "--num-pairs", "1", "-o", str(tmp_path / "pairs")]
    assert main(words) == 1
    assert "holds the unfinished dataset of another command" in capsys.readouterr().err
    assert prepare(surveys, tmp_path / "pairs") == 0
    assert same_files(tmp_path / "pairs", undisturbed)


def test_shards_are_joined_by_links_into_the_undisturbed_dataset(
    surveys, undisturbed, tmp_path, capsys
):
    shards = [tmp_path / f"shard{k}" for k in (1, 2, 3)]
    for k, shard in enumerate(shards, start=1):
        assert prepare(surveys, shard, "--shard", f"{k}/3") == 0
    sizes = [len(open_samples(shard, "train")) for shard in shards]
    assert max(sizes) < 2.5 * min(sizes)
    joined = tmp_path / "joined"
    words = ["prepare", "join", *map(str, (shards[2], shards[0], shards[1])), "-o", str(joined)]
    assert main(words) == 0
    assert same_files(joined, undisturbed)
    file = next((shards[0] / "train").glob("*.arrow"))
    assert file.samefile(joined / "train" / file.name)
    shutil.rmtree(shards[0])
    assert len(open_samples(joined, "train").points(0)["source"])

    capsys.readouterr()
    assert main(["prepare", "join", *map(str, shards[1:]), "-o", str(tmp_path / "two")]) == 1
    assert "missing: --shard 1/3" in capsys.readouterr().err
    one_more = [*map(str, shards[1:]), str(undisturbed)]
    assert main(["prepare", "join", *one_more, "-o", str(tmp_path / "two")]) == 1
    assert "is no shard" in capsys.readouterr().err


@pytest.fixture
def islands(tmp_path) -> Path:
    """A plot of 200 m x 40 m with 8,000 points and a far one with 60, for tiles of 10 m."""
    points = np.random.default_rng(1).random((8060, 3)) * [200, 40, 3]
    points += [500_000, 4_000_000, 0]
    points[8000:] += [5000, 0, 0]
    write_las(tmp_path / "islands" / "dense.las", points[:8000])
    write_las(tmp_path / "islands" / "sparse.las", points[8000:])
    return tmp_path / "islands"


def thin_islands(islands: Path, output: Path, *more: object) -> int:
    words = ("prepare", "thin", islands, "--ratio", 2, "--min-points", 8, "--num-workers", 1)
    return main([str(word) for word in (*words, "-o", output, *more)])


def test_shards_without_training_pairs_and_without_any_pairs_are_joined_with_the_others(
    islands, tmp_path, capsys
):
    held_out = ("--seed", 2)
    assert thin_islands(islands, tmp_path / "undisturbed", *held_out) == 0
    shards, found = [tmp_path / f"shard{k}" for k in range(1, 15)], set()
    capsys.readouterr()
    for k, shard in enumerate(shards, start=1):
        assert thin_islands(islands, shard, *held_out, "--shard", f"{k}/14") == 0
        output, reported = capsys.readouterr()
        assert "held out for validation" not in reported and "pointup inspect" not in output
        first, *_, last = output.splitlines()
        assert last == f"next: pointup prepare join {shard} ... -o DIR, with all 14 shards"
        found.add(first.removeprefix(f"{shard}: ").split(",")[0])
    assert {"0 pairs", "16 pairs (16 train)", "16 pairs (16 validation)"} <= found
    joined = tmp_path / "joined"
    assert main(["prepare", "join", *map(str, shards), "-o", str(joined)]) == 0
    assert same_files(joined, tmp_path / "undisturbed")


def test_shards_that_all_have_no_training_pairs_are_not_joined(islands, tmp_path, capsys):
    shards = [str(tmp_path / f"shard{k}") for k in (1, 2)]
    for k, shard in enumerate(shards, start=1):
        assert thin_islands(islands, Path(shard), "--shard", f"{k}/2", "--tile", 0.5) == 0
    assert "0 pairs, 0 points" in capsys.readouterr().out
    assert main(["prepare", "join", *shards, "-o", str(tmp_path / "joined")]) == 1
    assert "no training pairs are left; try a smaller --tile" in capsys.readouterr().err
    assert not (tmp_path / "joined").exists()


def test_more_shards_than_regions_are_refused_for_each_shard(islands, tmp_path, capsys):
    for k in (1, 400):
        assert thin_islands(islands, tmp_path / "out", "--shard", f"{k}/400") == 1
        assert "regions; give fewer shards" in capsys.readouterr().err


def test_a_file_that_can_not_be_used_is_named_once_and_the_rest_is_prepared(
    surveys, tmp_path, capsys
):
    copy = tmp_path / "surveys"
    shutil.copytree(surveys, copy)
    (copy / "dense" / "4.las").write_bytes((copy / "dense" / "4.las").read_bytes()[:20_000])
    with laspy.open(copy / "sparse" / "1.las", "r") as reader:
        points = reader.read().points
    with (copy / "sparse" / "1.las").open("r+b") as file:
        # max x of the header, by 10 m too small
        file.seek(179)
        file.write(np.float64(np.max(points.x) - 10).tobytes())
    assert prepare(copy, tmp_path / "pairs") == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if "left out: " in line]
    assert len(lines) == 2 and "4.las" in lines[0] + lines[1]
    assert any("outside of the extent in its header" in line for line in lines)
    names = load_from_disk(tmp_path / "pairs")["train"]["name"]
    assert not any(name.startswith("tile_100015_80001") for name in names)
    assert len(names) > 400


@pytest.mark.parametrize("is_large", [True, False])
def test_a_full_disk_ends_the_command_and_leaves_out_no_input(
    is_large, surveys, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(regions, "LARGE_BYTES", 0 if is_large else 10**9)
    real, written = survey_tiles._block_file, []

    def full_once(folder: Path, block_xy: tuple[int, int]) -> Path:
        written.append(block_xy)
        return Path("/dev/full") if len(written) == 5 else real(folder, block_xy)

    monkeypatch.setattr(survey_tiles, "_block_file", full_once)
    assert thin(surveys, tmp_path / "pairs") == 1
    error = capsys.readouterr().err
    assert "error: /dev/full: can't be written: No space left on device; free space" in error
    assert "left out" not in error
    assert not (tmp_path / "pairs").exists()


def test_a_small_survey_is_not_sharded(surveys, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(regions, "LARGE_BYTES", 10**9)
    assert prepare(surveys, tmp_path / "pairs", "--shard", "1/2") == 1
    assert "leave it out" in capsys.readouterr().err
    assert prepare(surveys, tmp_path / "pairs", "--shard", "3/2") == 1
    assert "K from 1 to N" in capsys.readouterr().err


# In short: an interrupt within the process, above.
@pytest.mark.slow
def test_a_command_that_is_killed_twice_continues_to_the_same_bytes(surveys, undisturbed, tmp_path):
    script = (
        "import sys\nfrom pointup import processes\nfrom pointup.datasets import regions\n"
        "regions.LARGE_BYTES, regions.POINTS_PER_REGION = 0, 1500\n"
        "processes.SECONDS_ALONE = 0.0\nfrom pointup.cli.main import main\n"
        "if __name__ == '__main__':\n    sys.exit(main(sys.argv[1:]))\n"
    )
    (tmp_path / "script.py").write_text(script)
    command = [
        sys.executable, str(tmp_path / "script.py"), "prepare", "pairs", "--source",
        str(surveys / "sparse"), "--target", str(surveys / "dense"), "--tile", "5", "--block", "2",
        "--min-points", "2", "--num-workers", "2", "-o", str(tmp_path / "pairs"),
    ]  # fmt: skip
    for number in (1, 3):
        process = subprocess.Popen(command, start_new_session=True)
        parts = tmp_path / ".pairs-unfinished" / "parts"
        while len([p for p in parts.glob("*") if "." not in p.name]) < number:
            assert process.poll() is None, "finished before it was killed"
        os.killpg(process.pid, 9)
        process.wait()
    subprocess.run(command, check=True)
    assert same_files(tmp_path / "pairs", undisturbed)
