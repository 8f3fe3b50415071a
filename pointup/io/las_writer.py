"""Writes LAS and LAZ: the original records bit for bit, followed by generated points.

laspy alone changes the creation date, the legacy counts and some VLRs of a copied file; this writer
keeps them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from struct import pack

import laspy
import lazrs
import numpy as np
from laspy.extradims import get_id_for_extra_dim_type
from laspy.header import GpsTimeType
from laspy.vlrs.known import ExtraBytesStruct, ExtraBytesVlr
from laspy.vlrs.vlr import VLR

from pointup.disk import os_errors
from pointup.errors import DataError, FileError
from pointup.io.bounds import Bounds
from pointup.io.cloud import (
    COLOURS,
    LARGEST_8_BIT,
    ExtraDimension,
    PointCloud,
    PointWriter,
    cast_values,
    check_names,
    check_positions,
    flatten_attributes,
    plain_name,
    warn_once,
)
from pointup.io.las import COORDINATES, CREATION_DATE_OFFSET, iter_records

LEGACY_COUNTS_OFFSET = 107
INT32 = np.iinfo(np.int32)
# Number of records that are written at a time: eight chunks of LAZ, each compressed by a thread.
_BATCH = 400_000


def copy_las(
    path: Path, writer: PointWriter, chunk_size: int, bounds: Bounds | None = None
) -> None:
    """Append raw records, all or those in `bounds`, to a writer opened with a cloud of the file."""
    assert isinstance(writer, LasWriter)
    for records, _, _ in iter_records(path, chunk_size, bounds=bounds):
        writer.write_records(records)


class LasWriter(PointWriter):
    """Writes LAS or LAZ, by the extension, with the layout of the file that `like` was read from.

    Scales, offsets, point format, version, VLRs, EVLRs and extra dimensions are those of the header
    of `like`; generated points are rounded to its scale. If `like` has no LAS header, LAS 1.4 is
    written, with the values of `LasConversion` and the scale of `new_header`: attributes that are
    not in the point format become extra dimensions. Attributes that a written cloud does not have
    are zero, but for return numbers, which are 1.

    Raises DataError for a `like` of another format with values that LAS can't hold.
    """

    def _lay_out(self, like: PointCloud) -> None:
        check_names(like.attributes, self.path)
        self._conversion, attributes = None, like.attributes
        if isinstance(like.header, laspy.LasHeader):
            header = deepcopy(like.header)
        else:
            self._conversion = LasConversion(like)
            attributes = self._conversion.attributes(attributes)
            header = new_header(like.positions, self._conversion.ranges)
            note_coarse_steps(self.path, header.scales[0], like.positions)
        self._check_writable(header)
        known = set(header.point_format.dimension_names)
        if self._conversion is not None:
            # Text formats read the extra dimensions of another file in wider types.
            known |= {dimension.name for dimension in self.extra_dimensions}
        unknown = {name: values for name, values in attributes.items() if name not in known}
        added = [
            ExtraDimension(name, "u1" if values.dtype == bool else values.dtype.name)
            for name, values in flatten_attributes(unknown).items()
        ]
        for dimension in (*added, *self.extra_dimensions):
            self._add_dimension(header, dimension)
        _drop_statistics(header)
        self.header = header
        self._waiting = list[np.ndarray]()
        if self._conversion is not None:
            for name, values in self._conversion.ranges.items():
                if name in known:
                    self._set(self._zeros(len(values)), name, values)

    def _check_writable(self, header: laspy.LasHeader) -> None:
        if header.global_encoding.waveform_data_packets_internal:
            raise FileError(
                f"{self.path}: waveforms inside the original can't be carried over; "
                "store them in a .wdp file beside it"
            )
        if header.point_format.id in (9, 10) and self.path.suffix.lower() == ".laz":
            # lazrs 0.8 confuses the wave packets of different scanner channels.
            raise FileError(f"{self.path}: waveforms can't be compressed exactly; name it .las")
        if str(header.version) == "1.0":
            raise FileError(f"{self.path}: LAS 1.0 can't be written; convert the original to 1.2")

    def _add_dimension(self, header: laspy.LasHeader, dimension: ExtraDimension) -> None:
        dtype = np.dtype(dimension.dtype)
        present = {known.name: known for known in header.point_format.dimensions}
        if dimension.name in present:
            # A wider type is that of a file that was converted from text.
            has = present[dimension.name].dtype
            if has is None or not np.can_cast(dtype, has):
                raise FileError(
                    f"{self.path}: the original has a dimension {dimension.name!r} of another type "
                    f"than {dtype.name}; rename or remove it there"
                )
            return
        described = header.vlrs.get("ExtraBytesVlr")
        if not described:
            described = [ExtraBytesVlr()]
            header.vlrs.extend(described)
        structs = described[0].extra_bytes_structs
        # Undescribed extra bytes of the original must be described before others can follow.
        for known in list(header.point_format.extra_dimensions)[len(structs) :]:
            if known.num_elements > 255:
                raise FileError(
                    f"{self.path}: the original has {known.num_elements} undescribed extra bytes "
                    "per point; dimensions can be added to at most 255 of them"
                )
            structs.append(ExtraBytesStruct(known.name.encode(), (0, known.num_elements)))
        try:
            kind = get_id_for_extra_dim_type(dtype)
        except laspy.errors.UnknownExtraType:
            raise DataError(
                f"{self.path}: LAS has no extra dimensions of type {dtype.name}"
                f" ({dimension.name!r}); use float32 or float64"
            ) from None
        name, description = dimension.name.encode(), dimension.description.encode()
        if len(name) > 32 or len(description) > 32:
            raise DataError(
                f"{self.path}: LAS has 32 bytes for a dimension's name; shorten {dimension.name!r}"
            )
        structs.append(ExtraBytesStruct(name, kind, description))
        header.point_format.add_extra_dimension(
            laspy.ExtraBytesParams(dimension.name, dtype, dimension.description)
        )

    def _begin(self) -> None:
        compress = self.path.suffix.lower() == ".laz"
        with self._las_errors():
            # Names in other encodings than ASCII are copied byte by byte.
            self._writer = laspy.LasWriter(
                self._stream,
                self.header,
                do_compress=compress,
                closefd=False,
                encoding_errors="replace",
            )

    def write_records(self, records: laspy.ScaleAwarePointRecord) -> None:
        """Append raw records of the original unchanged; added dimensions get their defaults."""
        extended = self._zeros(len(records))
        size = records.array.dtype.itemsize
        if (
            extended.array.dtype.descr[: len(records.array.dtype.descr)]
            != records.array.dtype.descr
            or (records.scales != self.header.scales).any()
            or (records.offsets != self.header.offsets).any()
        ):
            raise DataError(
                f"{self.path}: records of another point format, scale or offset; open the writer "
                "like the file they come from"
            )
        before = records.array.view(np.uint8).reshape(len(records), size)
        extended.array.view(np.uint8).reshape(len(records), -1)[:, :size] = before
        for name, values in self._defaults(len(records)).items():
            if name not in records.array.dtype.names:
                self._set(extended, name, values)
        with os_errors(self.path, "written"):
            self._write(extended)
        self.num_points += len(records)

    def _append(self, positions: np.ndarray, attributes: dict[str, np.ndarray]) -> None:
        records = self._zeros(len(positions))
        if self._conversion is not None:
            attributes = self._conversion.attributes(attributes)
            # LAS counts returns from 1, and an only return is 1 of 1.
            number = attributes.get("return_number", np.ones(len(positions), np.uint8))
            attributes = {"return_number": number, "number_of_returns": number} | attributes
        for axis, name in enumerate(COORDINATES):
            steps = (positions[:, axis] - self.header.offsets[axis]) / self.header.scales[axis]
            steps = np.rint(steps)
            if steps.min() < INT32.min or steps.max() > INT32.max:
                limits = self.header.offsets[axis] + self.header.scales[axis] * np.array(
                    [INT32.min, INT32.max], np.float64
                )
                reason = (
                    "the range of the original's scale and offset; convert it to a coarser scale"
                    if self._conversion is None
                    else "what LAS holds at the scale for the original's extent; write a PLY file"
                )
                raise FileError(
                    f"{self.path}: {name.lower()} from {positions[:, axis].min()} to "
                    f"{positions[:, axis].max()} is beyond {limits[0]} to {limits[1]}, {reason}"
                )
            records.array[name] = steps
        known = set(self.header.point_format.dimension_names)
        unknown = {name: values for name, values in attributes.items() if name not in known}
        for name, values in attributes.items():
            if name in known:
                self._set(records, name, values)
        for name, values in flatten_attributes(unknown).items():
            self._set(records, name, values)
        self._write(records)

    def _write(self, records: laspy.ScaleAwarePointRecord) -> None:
        self._waiting.append(records.array)
        if sum(map(len, self._waiting)) >= _BATCH:
            self._flush()

    def _flush(self) -> None:
        records = self._zeros(0)
        records.array, self._waiting = np.concatenate([records.array, *self._waiting]), []
        with self._las_errors():
            self._writer.write_points(records)

    def _zeros(self, num_points: int) -> laspy.ScaleAwarePointRecord:
        return laspy.ScaleAwarePointRecord.zeros(num_points, header=self.header)

    def _set(self, records: laspy.ScaleAwarePointRecord, name: str, values: np.ndarray) -> None:
        try:
            dimension = self.header.point_format.dimension_by_name(name)
        except ValueError:
            raise DataError(
                f"{self.path}: has no dimension {name!r}; add it with extra_dimensions"
            ) from None
        what = f"{self.path}: {name}"
        if name in COLOURS and values.dtype == np.uint8:
            # LAS requires 8-bit colours to be stored as 16-bit ones, multiplied by 256.
            values = values.astype(np.uint16) * 256
        if dimension.is_scaled:
            # laspy rounds a scaled float to an integer, and its error is no error of LAS.
            raw = records.array[name]
            steps = (values - dimension.offsets) / dimension.scales
            raw[:] = cast_values(steps, raw.dtype, what).reshape(raw.shape)
            return
        # Bit fields have no dtype.
        dtype = np.dtype(np.uint8) if dimension.dtype is None else dimension.dtype.base
        values = cast_values(values, dtype, what)
        if dimension.dtype is None and values.max() > dimension.max:
            raise DataError(
                f"{what}: value {values.max()} doesn't fit the {dimension.num_bits} bits that "
                f"point format {self.header.point_format.id} has for it"
            )
        records[name] = values

    def _end(self) -> None:
        self._flush()
        with self._las_errors():
            if self.header.evlrs:
                self._writer.write_evlrs(self.header.evlrs)
            self._writer.close()
        self._fix_header()

    def _fix_header(self) -> None:
        """Write the parts of the header that laspy does not: the original date, the legacy counts.

        LAS 1.4 requires legacy counts for point formats below 6 if they fit into 32 bits; older
        readers know no other counts.
        """
        raw_date = getattr(self.header, "raw_creation_date", None)
        if raw_date is not None:
            self._stream.seek(CREATION_DATE_OFFSET)
            self._stream.write(raw_date)
        # `self.header` holds the counts of the original.
        written = self._writer.header
        counts = [written.point_count, *written.number_of_points_by_return[:5]]
        is_legacy = str(written.version) == "1.4" and written.point_format.id < 6
        if is_legacy and counts[0] < 2**32:
            self._stream.seek(LEGACY_COUNTS_OFFSET)
            self._stream.write(pack("<6I", *map(int, counts)))

    @contextmanager
    def _las_errors(self) -> Iterator[None]:
        try:
            yield
        except (laspy.errors.LaspyException, ValueError) as error:
            raise FileError(f"{self.path}: can't be written like the original: {error}") from error
        except lazrs.LazrsError as error:
            raise FileError(f"{self.path}: can't be written: {error}; is the disk full?") from error


def _drop_statistics(header: laspy.LasHeader) -> None:
    # laspy computes the minimum and maximum of an extra dimension from the first point of each
    # chunk only, and those of the original don't hold for generated points. So neither is written.
    for record in header.vlrs.extract("ExtraBytesVlr"):
        for struct in record.extra_bytes_structs:
            if struct.data_type:
                struct.options &= ~(struct.MIN_BIT_MASK | struct.MAX_BIT_MASK)
                struct._min, struct._max = type(struct._min)(), type(struct._max)()
        raw = VLR(record.user_id, record.record_id, record.description, record.record_data_bytes())
        header.vlrs.append(raw)


LARGEST_16_BIT = 65_535
SCAN_ANGLE_STEP = 0.006
"""Unit in degrees of the scan angles of point formats 6 and above; other programs write degrees."""
SECONDS_OF_WEEK = 604_800
POINT_FORMAT = 8
"""The point format with all standard dimensions."""
ALIASES = {"scananglerank": "scan_angle", "infrared": "nir"}
"""Names of PDAL, CloudCompare and older point formats, without underscores, of dimensions."""
SHORT_COLOURS = dict(zip("rgb", COLOURS, strict=True))
# Coordinate steps per extent: 0.1 mm in a kilometre. At most 1 mm, while an int32 has half an
# extent left on each side: new points may lie outside of the measured ones.
STEPS_PER_EXTENT, COARSE_STEP, MOST_STEPS = 1e7, 1e-3, 2.0**31
# The offset is a multiple of a million steps.
OFFSET_DIGITS = 6


def extremes(attributes: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Smallest and largest value (2,) of each attribute.

    Attributes with several values for each point, and those that are not numbers, are left out.
    """
    return {
        name: np.array([values.min(), values.max()])
        for name, values in attributes.items()
        if values.ndim == 1 and len(values) and values.dtype.kind in "biuf"
    }


class LasConversion:
    """How the attributes of a cloud of another format become standard dimensions of LAS.

    Names match whatever their case and underscores: `Classification`, `ReturnNumber`. Intensities
    and colours from 0 to 1 with fractions are multiplied by 65,535, and colours up to 255 by 256,
    as LAS requires. Columns R, G and B are colours. Scan angles are degrees if they are floats or
    named ScanAngleRank. The attributes of `like` hold at least their smallest and largest values.

    Attributes:
        ranges: smallest and largest value (2,) of the converted attributes of `like`.
    """

    def __init__(self, like: PointCloud) -> None:
        standard = {
            _plain(name): name for name in laspy.PointFormat(POINT_FORMAT).standard_dimension_names
        } | ALIASES
        # A single column R may be anything.
        if SHORT_COLOURS.keys() <= {_plain(name) for name in like.attributes}:
            standard |= SHORT_COLOURS
        self._names: dict[str, str] = {}
        for name in like.attributes:
            known = standard.get(_plain(name), name)
            is_taken = known in like.attributes or known in self._names.values()
            self._names[name] = name if is_taken else known
        ranges = extremes(self._renamed(like.attributes))
        colours = [ranges[name] for name in COLOURS if name in ranges]
        self._factors: dict[str, float] = {}
        if colours:
            factor = _factor(np.concatenate(colours), is_colour=True)
            self._factors = dict.fromkeys(COLOURS, factor)
        if "intensity" in ranges:
            self._factors["intensity"] = _factor(ranges["intensity"], is_colour=False)
        is_rank = any(
            known == "scan_angle" and _plain(name) in ALIASES for name, known in self._names.items()
        )
        if "scan_angle" in ranges and (is_rank or ranges["scan_angle"].dtype.kind == "f"):
            self._factors["scan_angle"] = 1 / SCAN_ANGLE_STEP
        self.ranges = extremes(self.attributes(like.attributes))

    def attributes(self, attributes: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The attributes of some points, with names and values of LAS."""
        converted = self._renamed(attributes)
        for name, factor in self._factors.items():
            if name in converted and factor != 1:
                converted[name] = converted[name].astype(np.float64) * factor
        return converted

    def _renamed(self, attributes: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {self._names.get(name, name): values for name, values in attributes.items()}


def new_header(positions: np.ndarray, ranges: Mapping[str, np.ndarray]) -> laspy.LasHeader:
    """The header of a LAS 1.4 file for converted attributes, with a scale for its extent.

    The scale, that of all axes, is a power of ten near 1e-7 of the extent of `positions` (N, 3),
    but 0.001 for more than 10 km, or the smallest of 0.002, 0.005, 0.01, ... that the extent
    allows. `ranges` are those of `LasConversion`.
    """
    point_format = 8 if "nir" in ranges else 7 if ranges.keys() & set(COLOURS) else 6
    header = laspy.LasHeader(version="1.4", point_format=point_format)
    header.global_encoding.wkt = True
    times = ranges.get("gps_time")
    # Standard times count from September 2011, and are negative before.
    if times is not None and (times[0] < 0 or times[1] > SECONDS_OF_WEEK):
        header.global_encoding.gps_time_type = GpsTimeType.STANDARD
    check_positions(positions, "points to write")
    low, high = positions.min(axis=0), positions.max(axis=0)
    extent = float((high - low).max()) or 1.0
    exponent = int(np.floor(np.log10(min(extent / STEPS_PER_EXTENT, COARSE_STEP))))
    # Not finer than the coordinates themselves.
    finest = float(np.spacing(np.abs(positions).max()))
    exponent = max(exponent, int(np.ceil(np.log10(finest))))
    factor = 1
    while factor * 10.0**exponent * MOST_STEPS < extent:
        exponent, factor = (exponent + 1, 1) if factor == 5 else (exponent, {1: 2, 2: 5}[factor])
    header.scales = np.full(3, factor * 10.0**exponent)
    # Few digits, so that coordinates in the steps of the scale keep theirs.
    header.offsets = np.round((low + high) / 2, -exponent - OFFSET_DIGITS)
    return header


def note_coarse_steps(path: Path, step: float, positions: np.ndarray) -> None:
    """Log a warning if the steps of coordinates are coarser than 1 mm in a survey in metres."""
    if step > COARSE_STEP:
        extent = np.ptp(positions, axis=0).max()
        warn_once(
            f"{path}: coordinates are rounded to multiples of {step:g}, the smallest that LAS has "
            f"for an extent of {extent:g}; remove points that lie far from all others, or write "
            "another format"
        )


def _plain(name: str) -> str:
    return plain_name(name).replace("_", "").replace(" ", "")


def _factor(values: np.ndarray, is_colour: bool) -> int:
    largest = values.max()
    if values.dtype.kind == "f" and largest <= 1:
        return LARGEST_16_BIT
    return LARGEST_8_BIT + 1 if is_colour and largest <= LARGEST_8_BIT else 1
