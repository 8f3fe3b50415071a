"""LAS and LAZ: chunked reading, and writing that keeps the original records bit for bit."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, BinaryIO

import laspy
import numpy as np
from laspy import DecompressionSelection
from laspy.extradims import get_id_for_extra_dim_type
from laspy.vlrs.known import ExtraBytesStruct, ExtraBytesVlr
from laspy.vlrs.vlr import VLR

from pointup.data.clouds import (
    ExtraDimension,
    PointCloud,
    PointWriter,
    cast_values,
    check_positions,
    flatten_attributes,
    os_errors,
)
from pointup.errors import DataError, FileError

COORDINATES = ("X", "Y", "Z")
COLOURS = ("red", "green", "blue")
CHUNK_SIZE = 1_000_000
# Steps in the extent of a cloud that comes from another format: 0.1 mm in a kilometre.
STEPS_PER_EXTENT = 1e7
# The returns are coded together with x and y. In formats from 6 on, half of the time is spent on
# what this leaves out.
POSITIONS_ONLY = DecompressionSelection.xy_returns_channel().decompress_z()
INT32 = np.iinfo(np.int32)

# laspy logs each error that it raises, too; without a handler, logging would print it.
logging.getLogger("laspy").addHandler(logging.NullHandler())


def iter_records(
    path: Path, chunk_size: int, selection: DecompressionSelection | None = None
) -> Iterator[tuple[laspy.ScaleAwarePointRecord, np.ndarray, laspy.LasHeader]]:
    """The file's point records, chunk by chunk, in the order of the file.

    Yields the raw records, their float64 coordinates (n, 3), and the header, always the same one.
    A COPC file is read as the LAZ file that it is, and its header is stripped of what makes it
    COPC. Of the point formats from 6 on, `selection` tells what to decompress; the rest is zero.
    Raises FileError for what isn't a LAS or LAZ file, is cut short or has no points.
    """
    with os_errors(path, "read"), path.open("rb") as stream:
        with _las_errors(path):
            reader = laspy.open(
                stream,
                closefd=False,
                decompression_selection=selection or DecompressionSelection.all(),
            )
            header = reader.header
            _keep_records_raw(stream, header)
        _check_header(path, header)
        for start in range(0, header.point_count, chunk_size):
            wanted = min(chunk_size, header.point_count - start)
            with _las_errors(path):
                records = reader.read_points(wanted)
            if len(records) < wanted:
                raise _broken(path, f"ends after {start + len(records)} of {header.point_count}")
            yield records, positions_of(records), header


def positions_of(records: laspy.ScaleAwarePointRecord) -> np.ndarray:
    """Coordinates of raw records, (n, 3) float64."""
    raw = records.array
    positions = np.empty((len(raw), 3))
    for axis, name in enumerate(COORDINATES):
        np.multiply(raw[name], records.scales[axis], out=positions[:, axis])
    positions += records.offsets
    return positions


def attributes_of(records: laspy.ScaleAwarePointRecord) -> dict[str, np.ndarray]:
    """All dimensions of raw records but the coordinates, bit fields unpacked."""
    names = [name for name in records.point_format.dimension_names if name not in COORDINATES]
    return {name: np.array(records[name]) for name in names}


def iter_las(path: Path, chunk_size: int, attributes: bool) -> Iterator[PointCloud]:
    """Chunks of the file as clouds, with their attributes or without."""
    selection = None if attributes else POSITIONS_ONLY
    for records, positions, header in iter_records(path, chunk_size, selection):
        check_positions(positions, str(path))
        yield PointCloud(positions, attributes_of(records) if attributes else {}, header, path)


def read_las(path: Path, attributes: bool) -> PointCloud:
    """The whole file as one cloud."""
    chunks = list(iter_las(path, CHUNK_SIZE, attributes))
    if len(chunks) == 1:
        return chunks[0]
    joined = {
        name: np.concatenate([chunk.attributes[name] for chunk in chunks])
        for name in chunks[0].attributes
    }
    positions = np.concatenate([chunk.positions for chunk in chunks])
    return PointCloud(positions, joined, chunks[0].header, path)


def copy_las(path: Path, writer: PointWriter, chunk_size: int) -> None:
    """Append the raw records of a file to a writer that was opened like it."""
    assert isinstance(writer, LasWriter)
    for records, _, _ in iter_records(path, chunk_size):
        writer.write_records(records)


def _keep_records_raw(stream: BinaryIO, header: laspy.LasHeader) -> None:
    """Makes the header's VLRs and EVLRs those of the file, byte for byte.

    laspy parses those it knows, and some come out of it changed: a WKT gets a null byte, an extra
    dimension loses its no-data value, and of several extra-bytes records all but one are left out.
    """
    position = stream.tell()
    count = len(header.vlrs)
    stream.seek(94)
    header_size = int.from_bytes(stream.read(2), "little")
    _restore(stream, header_size, header.vlrs, count, extended=False)
    if header.evlrs:
        _restore(stream, header.start_of_first_evlr, header.evlrs, len(header.evlrs), extended=True)
    stream.seek(position)
    for records in (header.vlrs, header.evlrs or []):
        records[:] = [record for record in records if record.user_id != "copc"]
    described = header.vlrs.get("ExtraBytesVlr")
    if len(described) > 1:
        _merge_extra_bytes(header, described)


def _restore(stream: BinaryIO, start: int, records: Any, count: int, extended: bool) -> None:
    stream.seek(start)
    for i in range(count):
        head = stream.read(60 if extended else 54)
        data = stream.read(int.from_bytes(head[20 : 28 if extended else 22], "little"))
        record = records[i]
        if record.user_id == "copc" or record.user_id == "laszip encoded":
            continue
        if record.record_data_bytes() != data:
            records[i] = VLR(record.user_id, record.record_id, record.description, data)


def _merge_extra_bytes(header: laspy.LasHeader, described: list[ExtraBytesVlr]) -> None:
    merged = ExtraBytesVlr()
    merged.parse_record_data(b"".join(record.record_data_bytes() for record in described))
    point_format = laspy.PointFormat(header.point_format.id)
    for dimension in merged.type_of_extra_dims():
        point_format.add_extra_dimension(dimension)
    if point_format.size == header.point_format.size:
        header.vlrs.extract("ExtraBytesVlr")
        header.vlrs.append(merged)
        header.point_format.dimensions[:] = point_format.dimensions


def _check_header(path: Path, header: laspy.LasHeader) -> None:
    if not header.point_count:
        raise FileError(f"{path}: no points in it; leave it out")
    if not (np.isfinite(header.scales).all() and np.isfinite(header.offsets).all()):
        raise _broken(path, "its header has a scale or offset that is not finite")
    if not header.are_points_compressed:
        end = header.offset_to_point_data + header.point_count * header.point_format.size
        if path.stat().st_size < end:
            raise _broken(path, f"has {path.stat().st_size} of {end} bytes")


def _broken(path: Path, reason: str) -> FileError:
    return FileError(f"{path}: not a whole LAS/LAZ file ({reason}); copy or export it again")


@contextmanager
def _las_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, FileError):
        raise
    # A damaged file makes laspy raise whatever its bytes lead to: struct, index, key, value and
    # memory errors, and its own.
    except Exception as error:
        raise _broken(path, (str(error) or repr(error)).splitlines()[0]) from error


class LasWriter(PointWriter):
    """Writes LAS, or LAZ by the name's extension, like the file that `like` was read from.

    Scales, offsets, point format, version, VLRs, EVLRs and extra dimensions are those of the
    header; generated points are rounded to its scale. Without a LAS header, LAS 1.4 is written,
    attributes that the format doesn't know as extra dimensions, coordinates in steps of about
    1e-7 of the extent of `like`. Attributes that `write` isn't given are zero.
    """

    def __init__(
        self, path: Path, like: PointCloud, extra_dimensions: Sequence[ExtraDimension] = ()
    ) -> None:
        super().__init__(path, extra_dimensions)
        if path.name.lower().endswith(".copc.laz"):
            raise FileError(f"{path}: COPC files can't be written; name it .laz")
        if isinstance(like.header, laspy.LasHeader):
            header = deepcopy(like.header)
        else:
            header = _new_header(like)
        self._check_carried(header)
        known = set(header.point_format.dimension_names)
        unknown = {name: values for name, values in like.attributes.items() if name not in known}
        added = [
            ExtraDimension(name, "u1" if values.dtype == bool else values.dtype.name)
            for name, values in flatten_attributes(unknown).items()
        ]
        for dimension in (*added, *self.extra_dimensions):
            self._add_dimension(header, dimension)
        _drop_statistics(header)
        self.header = header

    def _check_carried(self, header: laspy.LasHeader) -> None:
        if header.global_encoding.waveform_data_packets_internal:
            raise FileError(
                f"{self.path}: waveforms inside the original can't be carried over; "
                "store them in a .wdp file beside it"
            )
        if str(header.version) == "1.0":
            raise FileError(f"{self.path}: LAS 1.0 can't be written; convert the original to 1.2")

    def _add_dimension(self, header: laspy.LasHeader, dimension: ExtraDimension) -> None:
        dtype = np.dtype(dimension.dtype)
        present = {known.name: known for known in header.point_format.dimensions}
        if dimension.name in present:
            if present[dimension.name].dtype != dtype:
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
        # Bytes that the original doesn't describe have to be described before others can follow.
        for known in list(header.point_format.extra_dimensions)[len(structs) :]:
            if known.num_elements > 255:
                raise FileError(
                    f"{self.path}: the original has {known.num_elements} extra bytes a point that "
                    "it doesn't describe; dimensions can be added to 255 of them at most"
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
        self._writer = laspy.LasWriter(
            self._stream, self.header, do_compress=compress, closefd=False
        )

    def write_records(self, records: laspy.ScaleAwarePointRecord) -> None:
        """Append raw records of the original: their bytes stay, added dimensions get defaults."""
        if not len(records):
            return
        grown = self._zeros(len(records))
        size = records.array.dtype.itemsize
        before = records.array.view(np.uint8).reshape(len(records), size)
        grown.array.view(np.uint8).reshape(len(records), -1)[:, :size] = before
        for name, values in self._defaults(len(records)).items():
            if name not in records.array.dtype.names:
                self._set(grown, name, values)
        with os_errors(self.path, "written"):
            self._writer.write_points(grown)
        self.num_points += len(records)

    def _append(self, positions: np.ndarray, attributes: dict[str, np.ndarray]) -> None:
        records = self._zeros(len(positions))
        for axis, name in enumerate(COORDINATES):
            steps = (positions[:, axis] - self.header.offsets[axis]) / self.header.scales[axis]
            steps = np.rint(steps)
            if steps.min() < INT32.min or steps.max() > INT32.max:
                held = self.header.offsets[axis] + self.header.scales[axis] * np.array(
                    [INT32.min, INT32.max], np.float64
                )
                raise FileError(
                    f"{self.path}: {name.lower()} from {positions[:, axis].min()} to "
                    f"{positions[:, axis].max()} is beyond {held[0]} to {held[1]}, what the scale "
                    "and offset of the original can hold; convert it to a coarser scale"
                )
            records.array[name] = steps
        known = set(self.header.point_format.dimension_names)
        unknown = {name: values for name, values in attributes.items() if name not in known}
        for name, values in attributes.items():
            if name in known:
                self._set(records, name, values)
        for name, values in flatten_attributes(unknown).items():
            self._set(records, name, values)
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
        if dimension.is_scaled:
            records[name] = values
            return
        values = cast_values(values, dimension.dtype.base, what)
        if dimension.num_bits < 8 and values.max() > dimension.max:
            raise DataError(
                f"{what}: value {values.max()} doesn't fit the {dimension.num_bits} bits that "
                f"point format {self.header.point_format.id} has for it"
            )
        records[name] = values

    def _end(self) -> None:
        if self.header.evlrs:
            self._writer.write_evlrs(self.header.evlrs)
        self._writer.close()


def _drop_statistics(header: laspy.LasHeader) -> None:
    # laspy would take the minimum and maximum of an extra dimension from the first point of each
    # chunk alone, and those of the original don't hold for generated points: say nothing.
    for record in header.vlrs.extract("ExtraBytesVlr"):
        for struct in record.extra_bytes_structs:
            if struct.data_type:
                struct.options &= ~(struct.MIN_BIT_MASK | struct.MAX_BIT_MASK)
                struct._min, struct._max = type(struct._min)(), type(struct._max)()
        raw = VLR(record.user_id, record.record_id, record.description, record.record_data_bytes())
        header.vlrs.append(raw)


def _new_header(like: PointCloud) -> laspy.LasHeader:
    names = like.attributes.keys()
    point_format = 8 if "nir" in names else 7 if set(COLOURS) & names else 6
    header = laspy.LasHeader(version="1.4", point_format=point_format)
    header.global_encoding.wkt = True
    check_positions(like.positions, "points to write")
    low, high = like.positions.min(axis=0), like.positions.max(axis=0)
    extent = float((high - low).max()) or 1.0
    header.scales = np.full(3, 10.0 ** np.floor(np.log10(extent / STEPS_PER_EXTENT)))
    header.offsets = np.floor(low)
    return header
