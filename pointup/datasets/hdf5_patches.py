"""Reads the HDF5 patches of PU-Net, PU-GAN and PU1K: one array of patches per point density."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pointup.datasets.pair import Pair
from pointup.datasets.survey_tiles import hold_out
from pointup.disk import check_expansion, library_errors
from pointup.errors import ConfigError, FileError

if TYPE_CHECKING:
    import h5py

# Keys of source and target in the published files: first PU-GAN and PU1K, then PU-Net.
KNOWN_KEYS = (("poisson_256", "poisson_1024"), ("montecarlo_1024", "poisson_4096"))
# A multiple of the patches per shape: 200 in PU-GAN, 50 and 150 in PU1K, 100 in PU-Net.
PATCHES_PER_BLOCK = 600
PATCHES_PER_READ = 256


@dataclass(frozen=True)
class PatchFile:
    """The arrays of a patch file that hold its pairs.

    The names of its pairs begin with `name`: NAME/PLACE/PATCH.
    `place` (P,) int64 is the index of the shape that each patch was cut from. If the file does not
    name shapes, it is the index of a block of consecutive patches. Patches of one place must be in
    the same split, and so must those of shapes of one name in several files. `shape_names` has the
    name of each place; None if the file does not name shapes, or numbers them, as each file may do
    from the first.
    """

    name: str
    path: Path
    source_key: str
    target_key: str
    place: np.ndarray
    has_normals: bool
    shape_names: tuple[str, ...] | None = None

    def shape_of(self, place: int) -> str:
        """What a place shows, as text that is the same for the same shape in any file."""
        if self.shape_names is None:
            return f"{self.path.resolve()}/{place}"
        return f"HDF5 shape {self.shape_names[place]}"

    @property
    def num_patches(self) -> int:
        return len(self.place)


def open_patches(
    path: Path,
    source_key: str | None = None,
    target_key: str | None = None,
    name: str | None = None,
) -> PatchFile:
    """Find the source and target patches of a file: arrays (P, N, 3) and (P, M, 3).

    The names of its pairs begin with `name`, by default that of the file without its extension.

    The arrays have 6 columns if they include normals. Without keys, the keys of the published files
    are tried. If none match and the file has exactly two arrays of patches, the one with fewer
    points is the source. Raises FileError if the file is not HDF5 or its arrays do not match,
    ConfigError that lists the arrays if the choice is ambiguous.
    """
    with _open(path) as file, library_errors(path, "can't be read ({}); copy it again"):
        arrays = _patch_arrays(file)
        source_key, target_key = _choose_keys(path, arrays, source_key, target_key)
        source, target = file[source_key], file[target_key]
        if len(source) != len(target):
            raise FileError(
                f"{path}: {source_key} holds {len(source)} patches, {target_key} {len(target)}; "
                "choose two arrays of equal length with --source-key and --target-key"
            )
        if not len(source):
            raise FileError(f"{path}: {source_key} holds no patches")
        for array in (source, target):
            rows = min(len(array), PATCHES_PER_READ)
            check_expansion(path, rows * math.prod(array.shape[1:]) * array.dtype.itemsize)
        first = np.asarray(target[:PATCHES_PER_READ])
        place, shape_names = _places(file, len(source))
        return PatchFile(
            name=name or path.stem,
            path=path,
            source_key=source_key,
            target_key=target_key,
            place=place,
            has_normals=_has_normals(first),
            shape_names=shape_names,
        )


def hold_out_patches(
    files: Sequence[PatchFile], fraction: float, seed: int
) -> Sequence[np.ndarray]:
    """Masks (P,) bool of the validation patches of each file, those of `fraction` of the places.

    Shapes of one name in several files are one place.
    """
    named = [number for number, file in enumerate(files) if file.shape_names is not None]
    groups = [[number] for number in range(len(files)) if number not in named]
    groups = sorted([*groups, named] if named else groups)
    places = [files[group[0]].place for group in groups]
    if named:
        names = [np.array(files[number].shape_names)[files[number].place] for number in named]
        of_all = np.unique(np.concatenate(names), return_inverse=True)[1]
        places[groups.index(named)] = of_all
    # Places lie side by side on a line.
    lines = [np.column_stack([place, np.zeros_like(place)]) for place in places]
    held_out: dict[int, np.ndarray] = {}
    for group, mask in zip(groups, hold_out(lines, fraction, seed, block=1), strict=True):
        ends = np.cumsum([files[number].num_patches for number in group])
        held_out |= zip(group, np.split(mask, ends[:-1]), strict=True)
    return [held_out[number] for number in range(len(files))]


def patch_pairs(
    patches: PatchFile, chosen: np.ndarray, report: Callable[[str], None]
) -> Iterator[Pair]:
    """Yield the pairs of the patches where `chosen` (P,) bool is True, in the order of the file.

    The file is read in blocks. Each pair is centred on the mean of its source and keeps the scale
    of the file. A patch with a coordinate that is not finite is left out and passed to `report`.
    """
    with _open(patches.path) as file:
        for start in range(0, patches.num_patches, PATCHES_PER_READ):
            rows = np.flatnonzero(chosen[start : start + PATCHES_PER_READ])
            if not len(rows):
                continue
            message = f"can't be read from patch {start} ({{}}); copy it again"
            with library_errors(patches.path, message):
                sources, targets = (
                    np.asarray(file[key][start : start + PATCHES_PER_READ], np.float64)[rows]
                    for key in (patches.source_key, patches.target_key)
                )
            for row, source, target in zip(rows, sources, targets, strict=True):
                name = f"{patches.name}/{patches.place[start + row]}/{start + row}"
                if np.isfinite(source).all() and np.isfinite(target).all():
                    yield _pair(name, source, target, patches.has_normals)
                else:
                    report(f"{name}: coordinates that are not finite")


def _pair(name: str, source: np.ndarray, target: np.ndarray, has_normals: bool) -> Pair:
    normals = None
    if has_normals:
        lengths = np.linalg.norm(target[:, 3:], axis=1, keepdims=True)
        normals = (target[:, 3:] / np.maximum(lengths, 1e-12)).astype(np.float32)
    return Pair.centred(name, source[:, :3], target[:, :3], target_normals=normals, vertical=False)


def _open(path: Path) -> h5py.File:
    import h5py

    if not path.is_file():
        raise FileError(f"{path}: no such file")
    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise FileError(f"{path}: not a readable HDF5 file ({error})") from error


def _patch_arrays(file: h5py.File) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all arrays that could be patches, including those in groups."""
    import h5py

    arrays: dict[str, tuple[int, ...]] = {}

    def visit(name: str, item: object) -> None:
        if isinstance(item, h5py.Dataset) and item.ndim == 3 and item.shape[2] in (3, 6):
            arrays[name] = item.shape

    file.visititems(visit)
    return arrays


def _choose_keys(
    path: Path, arrays: dict[str, tuple[int, ...]], source_key: str | None, target_key: str | None
) -> tuple[str, str]:
    if not arrays:
        raise FileError(f"{path}: has no arrays of patches, (P, N, 3) or (P, N, 6)")
    listed = ", ".join(f"{k} {'x'.join(map(str, s))}" for k, s in arrays.items())
    for key in (source_key, target_key):
        if key is not None and key not in arrays:
            raise ConfigError(f"{path}: no array of patches {key!r} (there are: {listed})")
    if source_key and target_key:
        return source_key, target_key
    if source_key is None and target_key is None:
        for known in KNOWN_KEYS:
            if set(known) <= set(arrays):
                return known
    if len(arrays) == len({shape[1] for shape in arrays.values()}) == 2:
        smaller, larger = sorted(arrays, key=lambda key: arrays[key][1])
        chosen = source_key or (larger if target_key == smaller else smaller)
        return chosen, larger if chosen == smaller else smaller
    raise ConfigError(
        f"{path}: say which arrays to pair with --source-key and --target-key (there are: {listed})"
    )


def _has_normals(target: np.ndarray) -> bool:
    if target.shape[2] != 6:
        return False
    lengths = np.linalg.norm(target[..., 3:].astype(np.float64), axis=2)
    return bool(abs(np.median(lengths) - 1) < 0.01)


def _places(file: h5py.File, num_patches: int) -> tuple[np.ndarray, tuple[str, ...] | None]:
    """`place` and `shape_names` of a `PatchFile`."""
    if "name" in file and file["name"].shape == (num_patches,):
        names, place = np.unique(file["name"][:], return_inverse=True)
        texts = [n.decode(errors="backslashreplace") for n in names.tolist() if type(n) is bytes]
        return place, tuple(texts) if len(texts) == len(names) else None
    block = min(PATCHES_PER_BLOCK, max(1, num_patches // 10))
    return np.arange(num_patches) // block, None
