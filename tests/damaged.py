"""Reads damaged copies of small valid files, in a separate process.

`python damaged.py DIRECTORY CASES FORMAT ...` prints a line of JSON: for each format, the number of
cases that were read, the number refused in one line, and all other outcomes; of commands a fifth.
A case that takes too long, or a crash, ends the process; its file stays in the directory.
"""

from __future__ import annotations

import faulthandler
import json
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from zlib import crc32

import h5py
import laspy
import numpy as np
import pyarrow.csv  # noqa: F401
import trimesh

from pointup.datasets.hdf5_patches import open_patches, patch_pairs
from pointup.errors import PointupError
from pointup.geometry.surfaces import Surface
from pointup.io.cloud import PointCloud
from pointup.io.files import iter_points, read_mesh, read_points, write_points
from pointup.io.pcd import PcdHeader
from pointup.io.ply import PlyHeader
from pointup.model.config import ModelConfig
from pointup.model.stored_model import FORMAT, check_options, read_config

# A case takes milliseconds; a busy machine takes a hundred times as long.
SECONDS_PER_CASE = 60
# In addition to the imports; far more than any of these files needs.
MEMORY = 1 << 30
LONGEST_MESSAGE = 600


def small_cloud() -> PointCloud:
    rng = np.random.default_rng(0)
    colours = {name: rng.integers(0, 256, 60, np.uint8) for name in ("red", "green", "blue")}
    positions = rng.normal(size=(60, 3)).astype(np.float32).astype(np.float64)
    return PointCloud(positions, {"intensity": rng.random(60, np.float32)} | colours)


def points(name: str, header: object = None) -> Callable[[Path], Path]:
    def make(directory: Path) -> Path:
        cloud, path = small_cloud(), directory / name
        cloud.header = header
        if name.endswith((".las", ".laz")):
            cloud.attributes["intensity"] = np.arange(60)
            cloud.attributes["height"] = np.arange(60) / 7
        write_points(path, cloud)
        return path

    return make


def las_1_2(directory: Path, name: str = "old.las") -> Path:
    header = laspy.LasHeader(version="1.2", point_format=3)
    header.add_extra_dim(laspy.ExtraBytesParams("height", "int16", scales=[0.1], offsets=[5.0]))
    records = laspy.ScaleAwarePointRecord.zeros(60, header=header)
    records["X"] = np.arange(60)
    with laspy.open(directory / name, "w", header=header) as writer:
        writer.write_points(records)
    return directory / name


def pcd(encoding: str) -> Callable[[Path], Path]:
    names = ("x", "y", "z", "rgb")
    header = PcdHeader(encoding, names, (("<f4", 1),) * 4)
    return points("cloud.pcd", header)


def compressed_pcd(directory: Path) -> Path:
    import lzf

    rows = np.zeros((60, 3), "<f4")
    rows[:, 0] = np.arange(60)
    body = lzf.compress(rows.T.tobytes())
    path = directory / "cloud.pcd"
    head = "FIELDS x y z\nSIZE 4 4 4\nTYPE F F F\nCOUNT 1 1 1\nWIDTH 60\nHEIGHT 1\nPOINTS 60\n"
    sizes = np.array([len(body), rows.nbytes], "<u4").tobytes()
    path.write_bytes((head + "DATA binary_compressed\n").encode() + sizes + body)
    return path


def compressed_npz(directory: Path) -> Path:
    cloud = small_cloud()
    np.savez_compressed(directory / "a.npz", positions=cloud.positions, **cloud.attributes)
    return directory / "a.npz"


def obj(directory: Path) -> Path:
    trimesh.creation.box().export(directory / "a.obj")
    return directory / "a.obj"


def mesh(suffix: str) -> Callable[[Path], Path]:
    def make(directory: Path) -> Path:
        trimesh.creation.icosphere(subdivisions=1).export(directory / f"mesh{suffix}")
        return directory / f"mesh{suffix}"

    return make


def surface(directory: Path) -> Path:
    sphere = trimesh.creation.icosphere(subdivisions=1)
    Surface.from_triangles(sphere.vertices, sphere.faces).save(directory / "surface.npz")
    return directory / "surface.npz"


def patches(directory: Path) -> Path:
    rng = np.random.default_rng(0)
    with h5py.File(directory / "patches.h5", "w") as file:
        for name, size in (("poisson_256", 8), ("poisson_1024", 32)):
            data = rng.random((6, size, 3), np.float32)
            file.create_dataset(name, data=data, chunks=(2, size, 3), compression="gzip")
        file.create_dataset("name", data=np.array([b"cat", b"cat", b"dog"] * 2))
    return directory / "patches.h5"


def config(directory: Path) -> Path:
    options = {
        "format": FORMAT,
        **{name: getattr(ModelConfig(), name) for name in vars(ModelConfig())},
    }
    (directory / "config.json").write_text(json.dumps(options, indent=1))
    return directory / "config.json"


def pairs(directory: Path) -> Path:
    from conftest import wavy_pair

    from pointup.datasets.pair_writer import write_pairs

    rng = np.random.default_rng(0)
    train, validation = ((wavy_pair(f"{i}", 20, 2, rng) for i in range(n)) for n in (4, 2))
    write_pairs(train, validation, directory / "pairs", info={})
    return next((directory / "pairs" / "train").glob("*.arrow"))


def read_pairs(path: Path) -> None:
    from pointup.datasets.opening import open_samples

    shutil.rmtree(path.parent.parent / "samples", ignore_errors=True)
    samples = open_samples(path.parent.parent, "train")
    bad = {sample.index for sample in samples.bad_samples(min_points=5)}
    for index in set(range(len(samples))) - bad:
        samples.pair(index).clouds()


def read_cloud(path: Path) -> None:
    chunks = list(iter_points(path, 25))
    assert sum(map(len, chunks)) == len(read_points(path, attributes=False))


def read_patches(path: Path) -> None:
    found = open_patches(path)
    for pair in patch_pairs(found, np.ones(found.num_patches, bool), lambda reason: None):
        pair.clouds()


def by_command(command: str, output: str) -> Callable[[Path], None]:
    """A reader that runs a command on a file, and raises the line of its error."""

    def read(path: Path) -> None:
        from pointup.cli.main import main

        errors = StringIO()
        with redirect_stderr(errors), redirect_stdout(StringIO()):
            status = main([command, str(path), "-o", str(path.with_name(output))])
        # Notes on what was left out may come before.
        before, _, error = errors.getvalue().partition("pointup: error: ")
        assert status == bool(error) and "Traceback" not in before + error, errors.getvalue()
        if error:
            raise ValueError(error.removesuffix("\n"))

    return read


def read_options(path: Path) -> None:
    stored = read_config(str(path.parent))
    check_options(str(path.parent), stored, {})


FORMATS: dict[str, tuple[Callable[[Path], Path], Callable[[Path], object]]] = {
    "las": (points("cloud.las"), read_cloud),
    "las 1.2": (las_1_2, read_cloud),
    "laz": (points("cloud.laz"), read_cloud),
    "laz 1.2": (partial(las_1_2, name="old.laz"), read_cloud),
    "ply ascii": (points("cloud.ply", PlyHeader("ascii")), read_cloud),
    "ply binary": (points("cloud.ply"), read_cloud),
    "pcd ascii": (pcd("ascii"), read_cloud),
    "pcd binary": (pcd("binary"), read_cloud),
    "pcd compressed": (compressed_pcd, read_cloud),
    "e57": (points("cloud.e57"), read_cloud),
    "pts": (points("cloud.pts"), read_cloud),
    "bin": (points("cloud.bin"), read_cloud),
    "xyz": (points("cloud.xyz"), read_cloud),
    "csv": (points("cloud.csv"), read_cloud),
    "npy": (points("cloud.npy"), read_cloud),
    "npz": (points("cloud.npz"), read_cloud),
    "npz compressed": (compressed_npz, read_cloud),
    "obj": (obj, read_cloud),
    "mesh off": (mesh(".off"), read_mesh),
    "mesh obj": (mesh(".obj"), read_mesh),
    "mesh stl": (mesh(".stl"), read_mesh),
    "mesh ply": (mesh(".ply"), read_mesh),
    "surface": (surface, Surface.load),
    "hdf5": (patches, read_patches),
    "config.json": (config, read_options),
    "pairs": (pairs, read_pairs),
}
COMMANDS = {
    "upsample las": (points("cloud.las"), by_command("upsample", "out.las")),
    "upsample ply": (points("cloud.ply"), by_command("upsample", "out.ply")),
    "upsample xyz": (points("cloud.xyz"), by_command("upsample", "out.xyz")),
    "view laz": (points("cloud.laz"), by_command("view", "out.html")),
    "view pcd": (pcd("binary"), by_command("view", "out.html")),
}
FORMATS |= COMMANDS
NEEDED = {"pcd compressed": "lzf", "e57": "pye57", "pairs": "pointup.datasets.pair_dataset"}
NEEDED |= dict.fromkeys(COMMANDS, "pointup.cli.upsample.files")


def damaged(data: bytes, rng: np.random.Generator) -> bytes:
    """A copy with one to three damaged places, more often in the header than in the rest."""
    changed = bytearray(data)
    for _ in range(rng.integers(1, 4)):
        size = len(changed)
        if not size:
            break
        reach = size if rng.random() < 0.4 else min(size, 700)
        at = int(rng.integers(0, reach))
        length = int(rng.integers(1, 9))
        match rng.integers(0, 9):
            case 0:
                del changed[at:]
            case 1:
                changed[at] ^= 1 << int(rng.integers(0, 8))
            case 2:
                changed[at : at + length] = rng.bytes(length)
            case 3:
                changed[at : at + length] = b"\xff" * length
            case 4:
                changed[at : at + length] = b"\0" * length
            case 5:
                del changed[at : at + length]
            case 6:
                changed[at:at] = rng.bytes(length)
            case 7:
                changed[at:at] = changed[at : at + 10 * length]
            case 8:
                # A number in text becomes a large one.
                digits = [i for i, byte in enumerate(changed[:reach]) if 48 <= byte <= 57]
                if digits:
                    at = digits[int(rng.integers(0, len(digits)))]
                    changed[at:at] = b"9" * int(rng.integers(1, 40))
    return bytes(changed)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def outcome(read: Callable[[Path], object], path: Path, folder: Path) -> str:
    """ "read", "refused", or what went wrong."""
    try:
        read(path)
    except (PointupError, ValueError) as error:
        text = str(error)
        if any(isinstance(cause, MemoryError) for cause in causes(error)):
            return f"all the memory: {text[:200]}"
        if "\n" in text or len(text) > LONGEST_MESSAGE or str(folder) not in text:
            return f"a bad message: {text[:500]!r}"
        return "refused"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return "read"


def main(directory: Path, num_cases: int, formats: list[str]) -> None:
    import resource

    # Before the limit, because libraries need address space.
    for module in (NEEDED[name] for name in formats if name in NEEDED):
        if find_spec(module):
            import_module(module)
    if COMMANDS.keys() & set(formats):
        warm = directory / "warm"
        warm.mkdir()
        by_command("upsample", "out.las")(points("cloud.las")(warm))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY,) * 2)
    warnings.simplefilter("error", RuntimeWarning)
    report: dict[str, dict[str, object]] = {}
    for name in formats:
        if name in NEEDED and not find_spec(NEEDED[name]):
            continue
        make, read = FORMATS[name]
        folder = directory / name
        folder.mkdir()
        whole = make(folder)
        assert outcome(read, whole, folder) == "read", (name, outcome(read, whole, folder))
        data = whole.read_bytes()
        cases = num_cases // 5 if name in COMMANDS else num_cases
        count: dict[str, object] = {"cases": cases, "read": 0, "refused": 0, "else": []}
        for case in range(cases):
            rng = np.random.default_rng([crc32(name.encode()), case])
            whole.write_bytes(damaged(data, rng))
            faulthandler.dump_traceback_later(SECONDS_PER_CASE, exit=True)
            kind = outcome(read, whole, folder)
            faulthandler.cancel_dump_traceback_later()
            if kind in ("read", "refused"):
                count[kind] += 1  # type: ignore[operator]
            else:
                count["else"].append([case, kind])  # type: ignore[attr-defined]
        report[name] = count
        print(f"{name}: {count}", file=sys.stderr, flush=True)
    print(json.dumps(report))


if __name__ == "__main__":
    faulthandler.enable()
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] or list(FORMATS))
