"""A point cloud with its attributes, and the base classes of all point writers."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Literal, Self

import numpy as np

from pointup.disk import check_output_file, os_errors, written_whole
from pointup.errors import DataError, FileError, NoPointsError

logger = logging.getLogger("pointup")

LAS_EXTENSIONS = (".las", ".laz")
COLOURS = ("red", "green", "blue")
LARGEST_8_BIT = 255


@dataclass(eq=False)
class PointCloud:
    """Points as a file stores them.

    Attributes:
        positions: (N, 3) float64 in the file's unit, without an offset subtracted.
        attributes: (N, ...) arrays by the names that the format uses: `intensity`, `red`, `nx`.
        header: set by the reader; a writer needs it to write the same kind of file.
        path: the file that the points were read from.
    """

    positions: np.ndarray
    attributes: dict[str, np.ndarray] = field(default_factory=dict)
    header: object | None = None
    path: Path | None = None

    def __len__(self) -> int:
        return len(self.positions)

    def select(self, index: np.ndarray | slice) -> PointCloud:
        """The points at `index` with their attributes; header and path stay the same."""
        attributes = {name: values[index] for name, values in self.attributes.items()}
        return PointCloud(self.positions[index], attributes, self.header, self.path)

    @classmethod
    def joined(cls, parts: Sequence[PointCloud]) -> PointCloud:
        """The points of several clouds; attributes, header and path are those of the first."""
        first = parts[0]
        attributes = {
            name: np.concatenate([part.attributes[name] for part in parts])
            for name in first.attributes
        }
        positions = np.concatenate([part.positions for part in parts])
        return cls(positions, attributes, first.header, first.path)


@dataclass(frozen=True)
class ExtraDimension:
    """An attribute that a writer adds to the attributes of the original file.

    Points without a value for it get `default`; "index" means the index of the point in the written
    file. `description` is written if the format has a field for it (32 bytes in LAS).
    """

    name: str
    dtype: str
    description: str = ""
    default: float | Literal["index"] = 0


class PointWriter(ABC):
    """Writes one point file atomically.

    A context manager; each call of `write` appends points. The points go to a temporary file in the
    folder of the target. The temporary file replaces the target when the block ends. It is deleted
    if an error or an interrupt leaves the block; an existing target is then unchanged. Symbolic
    links are followed: the link stays and its target is written.

    Raises FileError if the file can't be written or gets no points, DataError for a cloud that does
    not fit the file.
    """

    _factor = 1

    def __init__(
        self, path: Path, like: PointCloud, extra_dimensions: Sequence[ExtraDimension] = ()
    ) -> None:
        self.path = path
        self.extra_dimensions = tuple(extra_dimensions)
        self.num_points = 0
        self._lay_out(like)

    @abstractmethod
    def _lay_out(self, like: PointCloud) -> None:
        """Choose a layout for clouds such as `like`: that of its file, if it has this format."""

    def __enter__(self) -> Self:
        with os_errors(self.path, "written"):
            check_output_file(self.path)
            with ExitStack() as stack:
                self._part = stack.enter_context(written_whole(self.path))
                self._stream: BinaryIO = stack.enter_context(self._part.open("wb+"))
                self._begin()
                self._unfinished = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if kind is not None:
            self._unfinished.__exit__(kind, *error)
            return
        with os_errors(self.path, "written"), self._unfinished:
            if not self.num_points:
                raise NoPointsError(f"{self.path}: there are no points to write")
            self._end()

    def write(self, cloud: PointCloud) -> None:
        """Append points; extra dimensions that the cloud does not have get their defaults."""
        if not len(cloud):
            return
        positions = np.asarray(cloud.positions, dtype=np.float64)
        check_positions(positions, f"{self.path}: points to write")
        for name, values in cloud.attributes.items():
            if len(values) != len(positions):
                raise DataError(
                    f"{self.path}: attribute {name!r} has {len(values)} values for "
                    f"{len(positions)} points"
                )
        attributes = self._defaults(len(positions)) | dict(cloud.attributes)
        with os_errors(self.path, "written"):
            self._append(positions, attributes)
        self.num_points += len(positions)

    def _defaults(self, num_points: int) -> dict[str, np.ndarray]:
        return {
            dimension.name: np.arange(self.num_points, self.num_points + num_points)
            if dimension.default == "index"
            else np.full(num_points, dimension.default)
            for dimension in self.extra_dimensions
        }

    def _cast(
        self, values: Mapping[str, np.ndarray], types: Mapping[str, np.dtype]
    ) -> dict[str, np.ndarray]:
        """The values in these types; DataError for other names than those of `types`."""
        if values.keys() != types.keys():
            names = ", ".join(sorted(values.keys() ^ types.keys()))
            raise DataError(f"{self.path}: all points need the same attributes; differing: {names}")
        return {
            name: cast_values(values[name], dtype, f"{self.path}: {name}")
            for name, dtype in types.items()
        }

    def _in_8_bits(self, colours: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """16-bit colours, as of LAS, as 8-bit ones. Up to the first chunk with a colour above 255
        they are taken for 8-bit ones already, as some programs write into LAS."""
        if any(values.max() > LARGEST_8_BIT for values in colours.values()):
            self._factor = LARGEST_8_BIT + 1
        return {name: values // self._factor for name, values in colours.items()}

    def _write_header(self) -> None:  # noqa: B027
        """Write what is before the points to `_stream`, if the format has such a header.

        It is written before the first point, and again after the last one, when `num_points` is
        known, with the same length.
        """

    def _begin(self) -> None:
        self._write_header()

    @abstractmethod
    def _append(self, positions: np.ndarray, attributes: dict[str, np.ndarray]) -> None:
        """Write points; `num_points` is the number of points written before."""

    def _end(self) -> None:
        self._stream.seek(0)
        self._write_header()


class ColumnWriter(PointWriter):
    """Writer of a format that is a table of named numeric columns.

    `columns` maps each name to its type and is fixed by `_lay_out`. x, y and z are float64.
    An attribute with several values per point becomes the columns NAME_0, NAME_1, ...
    """

    _narrowed: tuple[str, ...] = ()

    def _lay_out(self, like: PointCloud) -> None:
        check_names(like.attributes, self.path)
        flat = flatten_attributes(like.attributes)
        self.columns: dict[str, np.dtype[Any]] = dict.fromkeys("xyz", np.dtype(np.float64))
        self.columns |= {name: values.dtype for name, values in flat.items()}
        self.columns |= {added.name: np.dtype(added.dtype) for added in self.extra_dimensions}

    def _append(self, positions: np.ndarray, attributes: dict[str, np.ndarray]) -> None:
        flat = dict(zip("xyz", positions.T, strict=True)) | flatten_attributes(attributes)
        flat |= self._in_8_bits({name: flat[name] for name in self._narrowed if name in flat})
        self._append_columns(self._cast(flat, self.columns))

    def _narrow_colours(self) -> None:
        """Store 16-bit colours with 8 bits: readers of the format know no others."""
        self._narrowed = tuple(n for n in COLOURS if self.columns.get(n) == np.uint16)
        self.columns |= dict.fromkeys(self._narrowed, np.dtype(np.uint8))

    @abstractmethod
    def _append_columns(self, columns: dict[str, np.ndarray]) -> None:
        """Write the rows of these columns, in the types and the order of `self.columns`."""


@lru_cache(maxsize=1000)
def warn_once(text: str) -> None:
    """Log a warning once per process and text, because a file is often read several times."""
    logger.warning("%s", text)


def as_positions(columns: Iterable[np.ndarray]) -> np.ndarray:
    """x, y and z as (N, 3) float64, without NumPy's warning about signalling NaN."""
    with np.errstate(invalid="ignore"):
        return np.column_stack([column.astype(np.float64) for column in columns])


def as_float64(positions: Any) -> np.ndarray:
    """Points (N, 3) of any kind as float64. FileError for a path, and where a conversion would lose
    the mask or a part."""
    if isinstance(positions, np.ma.MaskedArray) and np.ma.is_masked(positions):
        masked = np.ma.getmaskarray(positions).reshape(len(positions), -1).any(axis=1)
        raise FileError(
            f"points: {masked.sum()} of {len(positions)} are masked; leave them out: "
            "points[~points.mask.any(axis=1)]"
        )
    if isinstance(positions, str | Path):
        raise FileError(f"{positions}: not points; read them by pointup.io.files.read_points")
    if hasattr(positions, "is_floating_point"):  # A tensor; reading files needs no torch.
        positions = positions.detach().cpu()
        # NumPy has no bfloat16.
        positions = positions.double() if positions.is_floating_point() else positions
    try:
        values = np.asarray(positions)
        if values.dtype.kind == "c":
            raise FileError("points: complex coordinates; give real ones, such as points.real")
        if values.dtype == bool:
            raise FileError("points: true and false, not coordinates; use a mask as points[mask]")
        return values.astype(np.float64, copy=False)
    except (TypeError, ValueError) as error:
        raise FileError(f"points: no array (N, 3) of numbers ({error}); make one") from None


def check_positions(positions: np.ndarray, what: str) -> None:
    """Raise FileError unless `positions` are finite (N, 3) with N > 0.

    The message begins with `what`.
    """
    if positions.ndim != 2 or positions.shape[1] != 3:
        raise FileError(f"{what}: expected (N, 3) coordinates, not {positions.shape}")
    if not len(positions):
        raise FileError(f"{what}: no points in it; leave it out")
    # Minimum and maximum propagate NaN, and need no (N, 3) array of booleans.
    if not (np.isfinite(positions.min()) and np.isfinite(positions.max())):
        bad = int(np.count_nonzero(~np.isfinite(positions).all(axis=1)))
        raise FileError(
            f"{what}: {bad} of {len(positions)} have NaN or infinite coordinates; remove them"
        )


def check_attributes(cloud: PointCloud, what: str, refused: str = "OMm") -> None:
    """Raise DataError for an attribute that is no array with a row for each point, or whose type is
    of one of the `refused` kinds of NumPy."""
    for name, values in cloud.attributes.items():
        if not isinstance(values, np.ndarray) or values.dtype.kind in refused:
            kind = getattr(values, "dtype", type(values).__name__)
            raise DataError(f"{what}: {name} is of type {kind}; give an array of numbers")
        if values.shape[:1] != (len(cloud),):
            raise DataError(
                f"{what}: {name} has shape {values.shape} for {len(cloud)} points; give one value "
                "for each"
            )


def check_names(names: Iterable[str], path: Path, taken: Sequence[str] = ("x", "y", "z")) -> None:
    """Raise DataError for an attribute that would replace the coordinates in the file."""
    for name in names:
        if name.lower() in taken:
            raise DataError(f"{path}: {name!r} is the name of coordinates; rename the attribute")


def without_blanks(names: Iterable[str], path: Path) -> dict[str, str]:
    """The names as a header that separates them by blanks has them: "Return Number" as
    Return_Number, with a note. Raises DataError for others, and for two that become one."""
    titles = {name: "_".join(name.split()) for name in names}
    for name, title in titles.items():
        if not title.isascii() or not title or [*titles.values()].count(title) > 1:
            raise DataError(f"{path}: {path.suffix} files can't have a column {name!r}; rename it")
    if changed := [title for name, title in titles.items() if title != name]:
        warn_once(f"{path}: names get underscores for their blanks: {', '.join(changed)}")
    return titles


LARGEST_COORDINATE, SMALLEST_EXTENT = 1e12, 1e-15


def check_magnitudes(positions: np.ndarray, what: str) -> None:
    """Raise FileError if coordinates (N, 3) are 1e12 or more; the message begins with `what`.

    They are those of missing points, such as -3.4e38 in rasters of GDAL. One of them makes all
    grids coarser than the spacing of the points.
    """
    largest = float(max(positions.min(initial=0.0), positions.max(initial=0.0), key=abs))
    if abs(largest) >= LARGEST_COORDINATE:
        bad = int(np.count_nonzero((np.abs(positions) >= LARGEST_COORDINATE).any(axis=1)))
        raise FileError(
            f"{what}: {bad} of {len(positions)} have coordinates of 1e12 or more, such as "
            f"{largest:g}; remove them if that stands for no data, else use a larger unit"
        )


def check_extent(low: np.ndarray, high: np.ndarray, what: str) -> None:
    """Raise DataError for points in a box (3,) to (3,) that is no point and shorter than 1e-15.

    Squares of distances in it underflow, and densities overflow.
    """
    longest = float((high - low).max())
    if 0 < longest < SMALLEST_EXTENT:
        raise DataError(f"{what} lie within {longest:.3g} of each other; use a smaller unit")


NO_DATA = -9999
"""The height that most programs write for a cell of a raster without one."""


def with_coordinates(cloud: PointCloud) -> PointCloud:
    """The points of a file whose coordinates are finite; a note counts the others.

    Many programs write NaN or infinity for a pulse without a return. Raises FileError if no point
    is left.
    """
    with np.errstate(invalid="ignore"):
        valid = np.isfinite(cloud.positions).all(axis=1)
    num_left_out = len(valid) - np.count_nonzero(valid)
    if 0 < num_left_out < len(valid):
        warn_once(f"{cloud.path}: {num_left_out:,} points without coordinates are left out")
        cloud = cloud.select(valid)
    check_positions(cloud.positions, str(cloud.path))
    num_no_data = np.count_nonzero(cloud.positions[:, 2] == NO_DATA)
    if 0 < num_no_data < len(cloud):
        warn_once(
            f"{cloud.path}: {num_no_data:,} points have z {NO_DATA}, which stands for no data; "
            "remove them"
        )
    return cloud


def flatten_attributes(attributes: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Attributes with one value per point: (N, k) becomes NAME_0 to NAME_(k - 1), each (N,)."""
    flat: dict[str, np.ndarray] = {}
    for name, values in attributes.items():
        if values.ndim == 1:
            flat[name] = values
        else:
            columns = values.reshape(len(values), -1).T
            flat |= {f"{name}_{i}": column for i, column in enumerate(columns)}
    return flat


def storable(dtype: np.dtype) -> np.dtype:
    """The type in which PLY, PCD and text store values: they have no bool and no 16-bit float."""
    return np.dtype({"?": "u1", "e": "f4"}.get(dtype.char, dtype))


def cast_values(values: np.ndarray, dtype: np.dtype, what: str) -> np.ndarray:
    """The values as `dtype`; floats are rounded to the nearest integer for an integer type.

    Raises DataError for values that the type can't hold; the message begins with `what`.
    """
    values = np.asarray(values)
    if values.dtype == dtype or not len(values):
        return values.astype(dtype, copy=False)
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            cast = values.astype(dtype)
        if values.dtype.kind in "iu" and not np.array_equal(cast.astype(values.dtype), values):
            raise DataError(f"{what}: integers up to {values.max()} don't fit {dtype.name}")
        return cast
    if dtype.kind == "b":
        return values.astype(dtype)
    if values.dtype.kind == "f":
        # A signalling NaN warns.
        with np.errstate(invalid="ignore"):
            values = np.rint(values)
    limits = np.iinfo(dtype)
    # The condition is negated, so that NaN also fails.
    if not (values.min() >= limits.min and values.max() <= limits.max):
        raise DataError(
            f"{what}: values {values.min()} to {values.max()} don't fit {dtype.name}, "
            f"which holds {limits.min} to {limits.max}; shift, scale or remove them"
        )
    return values.astype(dtype)


NOISE_CLASSES = (7, 18)
"""ASPRS classes of low and high noise."""
CLASSIFICATION, WITHHELD, SYNTHETIC = "classification", "withheld", "synthetic"


def is_noise(cloud: PointCloud) -> np.ndarray:
    """Mask (N,) bool of the points of a noise class and of withheld points."""
    noise = np.zeros(len(cloud), bool)
    classes, withheld = attribute(cloud, CLASSIFICATION), attribute(cloud, WITHHELD)
    if classes is not None:
        noise |= np.isin(classes, NOISE_CLASSES)
    if withheld is not None:
        noise |= withheld != 0
    return noise


def is_synthetic(cloud: PointCloud) -> np.ndarray:
    """Mask (N,) bool of the points with the synthetic flag, such as new points of an upsampling."""
    synthetic = attribute(cloud, SYNTHETIC)
    return np.zeros(len(cloud), bool) if synthetic is None else synthetic != 0


def plain_name(name: str) -> str:
    """The name of an attribute as in LAS; others write scalar_Intensity, diffuse_red."""
    return name.lower().removeprefix("scalar_").removeprefix("diffuse_")


def attribute(cloud: PointCloud, name: str) -> np.ndarray | None:
    """A scalar attribute (N,) by its `plain_name`; None if there is none."""
    for known, values in cloud.attributes.items():
        if plain_name(known) == name and values.ndim == 1:
            return values
    return None


VEGETATION_CLASSES = (3, 4, 5)
"""ASPRS classes of low, medium and high vegetation."""
MUCH_VEGETATION = 0.3
"""Share of vegetation from which on the model for forests is named."""
NUMBER_OF_RETURNS = "number_of_returns"
_UNCLASSIFIED = (0, 1)


def is_vegetation(cloud: PointCloud) -> np.ndarray:
    """Mask (N,) bool of the points of a vegetation class.

    Where no point has one, it is that of the points without a class whose pulse had several
    returns: leaves let a part of a pulse through, and surfaces do not. A cloud with neither
    attribute has none.
    """
    classes = attribute(cloud, CLASSIFICATION)
    classes = np.zeros(len(cloud), np.uint8) if classes is None else classes
    of_class = np.isin(classes, VEGETATION_CLASSES)
    number = attribute(cloud, NUMBER_OF_RETURNS)
    if number is None or of_class.any():
        return of_class
    return (number > 1) & np.isin(classes, _UNCLASSIFIED)
