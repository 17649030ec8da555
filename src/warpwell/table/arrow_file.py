"""`ArrowFile`: an Arrow IPC file or stream (Feather, data sets of Hugging Face), opened in place.

pyarrow parses the metadata in Warpwell's mapping of the file, which reads as zeros after a truncated end. Each buffer
that pyarrow finds is checked against the file and the number of rows before any byte of it is read.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np

from ..errors import FormatError
from . import arrow as pa
from .column import ColumnRun, checked_extent, in_place_error
from .extent import Extent, MappedFile, validate
from .layout import NESTED, Layout, layout_of, storage_of
from .library import line_of, readable_columns
from .zones import FILE_ID, ZoneMap, Zones, read_zones

_BYTE = np.dtype(np.uint8)
_BITS = Layout("bits", _BYTE)
_FILE = b"ARROW1"
_OTHER_FORMATS = {
    b"PAR1": "a Parquet file",
    b"FEA1": "a Feather file of version 1",
    b"ORC": "an ORC file",
    b"\x93NUMPY": "a .npy file",
    b"PK\x03\x04": "a zip archive",
    b"\x1f\x8b": "a gzip file",
}


class ArrowFile:
    """The record batches of an Arrow IPC file or stream.

    Parameters
    ----------
    path : str

    Attributes
    ----------
    path : str
        Absolute.
    schema : pyarrow.Schema
    rows : int
    id : str or None
        `FILE_ID` of its footer.

    Raises
    ------
    FormatError
        The file is not an Arrow IPC file, or is damaged, compressed, or big-endian.
    """

    def __init__(self, path: str, direct: bool | None = None) -> None:
        self._file = MappedFile(path, direct)
        self.path = self._file.path
        try:
            self._file.read_alone(is_alone=True)
            self.schema, self._batches = self._parse()
            self._file.read_alone(is_alone=False)
        except BaseException:
            self._file.close()
            raise
        self._starts: list[int] = [0, *accumulate(batch.num_rows for batch in self._batches)]
        self.rows = self._starts[-1]
        self._dictionaries: dict[tuple[Any, ...], Any] = {}
        """Checked copies of dictionaries, by their addresses and lengths."""

    def _parse(self) -> tuple[Any, list[Any]]:
        path = self._file.path
        head = self._file.buffer.slice(0, min(8, self._file.nbytes)).to_pybytes()
        for magic, description in _OTHER_FORMATS.items():
            if head.startswith(magic):
                raise FormatError(
                    f"{path} is {description}, not an Arrow IPC file: convert the rows in it with "
                    f"ww.table.convert({path!r}, 'NAME.ww'), and open NAME.ww",
                    path=path,
                )
        try:
            is_file = head.startswith(_FILE)
            reader = (pa.ipc.open_file if is_file else pa.ipc.open_stream)(
                pa.BufferReader(self._file.buffer), options=pa.ipc.IpcReadOptions(use_threads=False)
            )
            # one after another, so that a compressed file is not unpacked whole
            batches = (reader.get_batch(k) for k in range(reader.num_record_batches)) if is_file else reader
            file_id = (getattr(reader, "metadata", None) or {}).get(FILE_ID)
            self.id = None if file_id is None else file_id.decode("latin-1")
            numbers = readable_columns(reader.schema, path)
            schema = pa.schema([reader.schema.field(number) for number in numbers], reader.schema.metadata)
            return schema, [self._in_place(batch.select(numbers)) for batch in batches]
        except (pa.ArrowException, OSError, MemoryError, OverflowError, UnicodeDecodeError) as error:
            self._file.require()
            if isinstance(error, FormatError):
                raise
            raise FormatError(
                f"{path} is not an Arrow IPC file, or is truncated or damaged ({line_of(error)}): write it again; "
                f"a CSV, JSON or other file is converted by ww.table.convert({path!r}, 'NAME.ww')",
                path=path,
            ) from None

    def _in_place(self, batch: Any) -> Any:
        """Return a batch if all of its buffers are in the file."""
        if batch.num_rows < 0:
            raise self._file.damaged(f"a batch has {batch.num_rows} rows")
        for column in batch.columns:
            for buffer in column.buffers():
                if buffer is not None and buffer.size and self._file.offset_of(buffer) is None:
                    raise in_place_error(self._file.path)
        return batch

    @cached_property
    def _zones(self) -> Zones | None:
        zones = read_zones(self.path, self.id)
        return zones if zones is not None and zones.rows == self.rows else None

    def zones(self, number: int) -> ZoneMap | None:
        """Return the zone map of a column."""
        return None if self._zones is None else self._zones.column(number)

    def runs(self, number: int) -> tuple[ColumnRun, ...]:
        """Return the runs of a column, one a record batch; raise FormatError if the file is damaged."""
        field = self.schema.field(number)
        layout = layout_of(field.type)
        self._file.require()
        try:
            return tuple(
                self._run(batch.column(number), self._starts[k], batch.num_rows, field, layout)
                for k, batch in enumerate(self._batches)
                if batch.num_rows
            )
        except SystemError:  # Python raises it for a negative length
            raise self._file.damaged(f"column {field.name!r} has a negative length") from None

    def _run(self, column: Any, first: int, rows: int, field: Any, layout: Layout) -> ColumnRun:
        file = self._file
        description = f"column {field.name!r}, rows from {first}"
        if len(column) != rows or column.offset:
            raise file.damaged(f"{description} has {len(column)} rows, but its batch has {rows}")
        if layout.kind == "null":
            return ColumnRun(file, first, rows, rows, field.type, layout, array=column)
        storage = column.storage if isinstance(column, pa.ExtensionArray) else column
        valid, *buffers = storage.buffers()
        bits = None
        if valid is not None:
            bits = checked_extent(file, valid, _BITS, _BITS.shape(rows), f"{description}, validity")
        nulls = int(storage.null_count)  # after the check, because it may count the bits
        if not 0 <= nulls <= rows or (nulls and bits is None and layout != NESTED):
            raise file.damaged(f"{description} states {nulls} nulls in {rows} rows")
        if layout.kind == "list":
            with file.checking(description):
                storage.validate()
            layout = NESTED if storage.values.null_count else layout
            buffers = buffers[1:]
        run = ColumnRun(file, first, rows, nulls, field.type, layout, valid=bits if nulls else None, array=column)
        if layout == NESTED:
            return dataclasses.replace(run, data=tuple(filter(None, map(self._all_bytes, (valid, *buffers)))))
        main = checked_extent(file, buffers[0], layout, layout.shape(rows), description)
        if layout.kind == "text":
            return dataclasses.replace(run, offsets=main, bytes=self._all_bytes(buffers[1]))
        if layout.kind == "views":
            data = [self._all_bytes(buffer) or Extent(file, 0, _BYTE, (0,)) for buffer in buffers[1:]]
            return dataclasses.replace(run, views=main, data=tuple(data))
        if layout.kind != "codes":
            return dataclasses.replace(run, values=main)
        run = dataclasses.replace(run, codes=main, dictionary=self._dictionary(storage.dictionary, description))
        if run.dictionary.null_count:
            run = dataclasses.replace(run, nulls=run.arrow().dictionary_decode().null_count)
        return run

    def _all_bytes(self, buffer: Any) -> Extent | None:
        """Return the extent of all bytes of a buffer."""
        return None if buffer is None else checked_extent(self._file, buffer, _BITS, (int(buffer.size),), "bytes")

    def _dictionary(self, values: Any, description: str) -> Any:
        """Return the values of codes, checked, and copied because the file may be cut later."""
        key = len(values), *((b.address, b.size) for b in values.buffers() if b is not None)
        if key not in self._dictionaries:
            with self._file.checking(f"the dictionary of {description}"):
                validate(values)
            buffers = [None if b is None else pa.py_buffer(b.to_pybytes()) for b in values.buffers()]
            self._dictionaries[key] = pa.Array.from_buffers(
                storage_of(values.type), len(values), buffers, offset=values.offset
            )
        return self._dictionaries[key]

    def require(self) -> None:
        """Raise MediumError if bytes could not be read."""
        self._file.require()

    def close(self) -> None:
        """Close the file; views stay valid."""
        self._batches = []
        self._file.close()
