"""Writes LAS and LAZ: the original records bit for bit, followed by generated points.

laspy alone changes the creation date, the legacy counts and some VLRs of a copied file; this writer
keeps them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from struct import pack

import laspy
import lazrs
import numpy as np
from laspy.extradims import get_id_for_extra_dim_type
from laspy.vlrs.known import ExtraBytesStruct, ExtraBytesVlr
from laspy.vlrs.vlr import VLR

from pointup.errors import DataError, FileError
from pointup.io.bounds import Bounds
from pointup.io.cloud import (
    ExtraDimension,
    PointCloud,
    PointWriter,
    cast_values,
    flatten_attributes,
    os_errors,
)
from pointup.io.las import COORDINATES, iter_records
from pointup.io.las_conversion import (
    COLOURS,
    LasConversion,
    new_header,
    note_coarse_steps,
    with_returns,
)
from pointup.io.las_layout import CREATION_DATE_OFFSET

LEGACY_COUNTS_OFFSET = 107
INT32 = np.iinfo(np.int32)


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

    def __init__(
        self, path: Path, like: PointCloud, extra_dimensions: Sequence[ExtraDimension] = ()
    ) -> None:
        super().__init__(path, extra_dimensions)
        self._conversion, attributes = None, like.attributes
        if isinstance(like.header, laspy.LasHeader):
            header = deepcopy(like.header)
        else:
            self._conversion = LasConversion(like)
            attributes = self._conversion.attributes(attributes)
            header = new_header(like.positions, self._conversion.ranges)
            note_coarse_steps(path, header.scales[0], like.positions)
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
        if not len(records):
            return
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
        with os_errors(self.path, "written"), self._las_errors():
            self._writer.write_points(extended)
        self.num_points += len(records)

    def _append(self, positions: np.ndarray, attributes: dict[str, np.ndarray]) -> None:
        records = self._zeros(len(positions))
        if self._conversion is not None:
            attributes = with_returns(self._conversion.attributes(attributes), len(positions))
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
