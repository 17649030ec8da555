"""Zone maps and checksums of an Arrow file, in an Arrow stream: ``trips.arrow.zones`` for ``trips.arrow``.

A block is 8,192 rows of the file. For each block, the file of zones has the minimum, the maximum, the number of nulls,
and whether there is a NaN, so that queries skip blocks that cannot match. The CRC-32C of each MiB lets `check` find
damage. The last four bytes of the stream are the CRC-32C of the stream itself.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import FormatError
from ..kv import crc32c
from ..replacing import durable_file
from . import arrow as pa
from .layout import family_of, storage_of
from .library import line_of

BLOCK_ROWS = 8192
"""Number of rows in a block."""
CHECKED_BYTES = 1 << 20
"""Number of bytes that one checksum covers."""
SUFFIX = ".zones"
FILE_ID = b"warpwell.id"
"""Key in an Arrow file's footer. Its value is a random name, which shows that zones belong to the file even if the file
was copied."""

_KEY = b"warpwell.zones"
_log = logging.getLogger(__package__)


@dataclass(frozen=True)
class ZoneMap:
    """The blocks of a column of one Arrow file, in order.

    Attributes
    ----------
    minimum, maximum : pyarrow.Array
        An item for each block, in the column's type, or for a dictionary column in the type of its values. Null if a
        block has only nulls and NaN. Zeros of both signs count as one value.
    null_counts : ndarray of int64
        Number of null rows of each block, including rows whose dictionary value is null.
    has_nan : ndarray of bool
    """

    minimum: Any
    maximum: Any
    null_counts: NDArray[np.int64]
    has_nan: NDArray[np.bool_]


class PartZones(NamedTuple):
    """The rows of a table that are in one Arrow file, and the zone map of a column of that file.

    The file's blocks begin at row `first` of the table; `zones` is None if there is no index, or the type has no order.
    """

    first: int
    rows: int
    zones: ZoneMap | None


class Zones:
    """The zone maps and checksums of an Arrow file.

    Attributes
    ----------
    rows, nbytes : int
        Numbers of rows and of bytes of the Arrow file.
    checksums : list of int
        The CRC-32C of each MiB of the Arrow file.
    """

    def __init__(self, batch: Any, description: dict[str, Any]) -> None:
        self._batch = batch
        self._description = description
        self.rows: int = description["rows"]
        self.nbytes: int = description.get("bytes", 0)
        self.checksums: list[int] = description.get("crc32c", [])

    def column(self, number: int) -> ZoneMap | None:
        """Return the zone map of a column; None for types that have no order, such as lists."""
        index = self._batch.schema.get_field_index(str(number))
        if index < 0:
            return None
        minimum, maximum, null_counts, has_nan = self._batch.column(index).flatten()
        return ZoneMap(minimum, maximum, null_counts.to_numpy(), has_nan.to_numpy(zero_copy_only=False))

    def require_complete(self) -> None:
        """Raise ValueError or TypeError if checksums or blocks are missing, as in files of another program."""
        blocks, checksums = -(-self.rows // BLOCK_ROWS), -(-self.nbytes // CHECKED_BYTES)
        is_complete = len(self.checksums) == checksums and {"id", "mtime_ns", "bytes"} <= self._description.keys()
        if not is_complete or any(len(c) != blocks or not pa.types.is_struct(c.type) for c in self._batch.columns):
            raise ValueError("it does not describe all rows and bytes")

    def is_of(self, path: str, file_id: str | None) -> bool:
        """Return whether the zones describe an Arrow file in its present state; `file_id` is its `FILE_ID` or None."""
        state, description = os.stat(path), self._description
        if description["bytes"] != state.st_size:
            return False
        return bool(description["id"] == file_id if file_id else description["mtime_ns"] == state.st_mtime_ns)

    def equals(self, zones: Zones) -> bool:
        """Return whether the zone maps are equal."""
        return self.rows == zones.rows and bool(self._batch.equals(zones._batch))


def read_zones(path: str, file_id: str | None) -> Zones | None:
    """Return the zones of an Arrow file; None, with a warning in the log, if they are damaged or of another file.

    Parameters
    ----------
    path : str
        The Arrow file.
    file_id : str or None
        `FILE_ID` of its footer.
    """
    try:
        zones = load_zones(path)
        if zones.is_of(path, file_id):
            return zones
        problem = f"{path}{SUFFIX} was made for another version of the file: run ww.table.index again"
    except FileNotFoundError:
        return None
    except FormatError as error:
        problem = str(error)
    _log.warning("queries of %s skip no blocks: %s", path, problem)
    return None


def load_zones(path: str) -> Zones:
    """Return the zones of an Arrow file; raise FileNotFoundError or, if they are damaged or old, FormatError."""
    name, raw = path + SUFFIX, b""
    try:
        raw = Path(name).read_bytes()
        if crc32c(raw[:-4]) != int.from_bytes(raw[-4:], "little"):
            raise ValueError("its checksum differs")
        reader = pa.ipc.open_stream(raw[:-4])
        zones = Zones(reader.read_next_batch(), json.loads(reader.schema.metadata[_KEY]))
        zones.require_complete()
        return zones
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError, RecursionError, StopIteration) as error:
        is_old = raw.startswith(b"ARROW1")  # a file, not a stream
        problem = "has the format of an earlier Warpwell" if is_old else f"is damaged ({line_of(error)})"
        raise FormatError(f"{name} {problem}: run ww.table.index again", path=name) from None


def write_zones(path: str, target: Path, file_id: str | None, zones: Zones) -> None:
    """Write the zones of an Arrow file to a file, durably.

    Parameters
    ----------
    path : str
    target : Path
    file_id : str or None
        `FILE_ID` in the file's footer. A file without one is identified by its size and the time of its last change.
    zones : Zones
        The zones of the file's rows.
    """
    state = os.stat(path)
    description = {
        "rows": zones.rows,
        "bytes": state.st_size,
        "mtime_ns": state.st_mtime_ns,
        "id": file_id,
        "crc32c": file_checksums(path),
    }
    sink = pa.BufferOutputStream()
    schema = zones._batch.schema.with_metadata({_KEY: json.dumps(description)})
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(zones._batch)
    raw = sink.getvalue().to_pybytes()
    with durable_file(target) as file:
        file.write(raw + crc32c(raw).to_bytes(4, "little"))


def compute_zones(schema: Any, tables: Iterable[Any]) -> Zones:
    """Return the zones of rows, without checksums; all tables but the last have whole blocks."""
    types = [(number, order_of(field.type)) for number, field in enumerate(schema)]
    orders = {number: order for number, order in types if order is not None}
    blocks: dict[int, list[Any]] = {number: [] for number in orders}
    rows = 0
    for block in (table.slice(first, BLOCK_ROWS) for table in tables for first in range(0, len(table), BLOCK_ROWS)):
        rows += len(block)
        for number, parts in blocks.items():
            parts.append(_zone(block.column(number), orders[number][1]))
    fields, columns = [], []
    for number, parts in blocks.items():
        value_type, order_type = orders[number]
        ends = [pa.array([part[k] for part in parts], order_type).cast(value_type) for k in (0, 1)]
        counts = [pa.array([part[2] for part in parts], pa.int64()), pa.array([part[3] for part in parts], pa.bool_())]
        column = pa.StructArray.from_arrays([*ends, *counts], ["minimum", "maximum", "null_count", "has_nan"])
        fields.append(pa.field(str(number), column.type))
        columns.append(column)
    return Zones(pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields)), {"rows": rows})


def file_checksums(path: str) -> list[int]:
    """Return the CRC-32C of each MiB of a file."""
    checksums: list[int] = []
    with open(path, "rb", buffering=0) as file:
        buffer = np.empty(CHECKED_BYTES, np.uint8)
        while True:
            filled = 0
            while count := file.readinto(buffer[filled:].data):
                filled += count
            if not filled:
                return checksums
            checksums.append(crc32c(buffer[:filled]))


def order_of(kind: Any) -> tuple[Any, Any] | None:
    """Return the type of a column's values, and the type by which pyarrow orders them; None if it has no order."""
    types, kind = pa.types, storage_of(kind)
    kind = storage_of(kind.value_type) if types.is_dictionary(kind) else kind
    if not family_of(kind):
        return None
    if types.is_float16(kind):
        return kind, pa.float32()
    if types.is_decimal32(kind) or types.is_decimal64(kind):
        return kind, pa.decimal128(kind.precision, kind.scale)
    return kind, pa.int64() if types.is_duration(kind) else kind


def _zone(column: Any, order_type: Any) -> tuple[Any, Any, int, bool]:
    """Return the minimum, maximum, null count and has-NaN of a block of a column."""
    chunks = [chunk.storage if isinstance(chunk, pa.ExtensionArray) else chunk for chunk in column.chunks]
    chunks = [chunk.dictionary_decode() if pa.types.is_dictionary(chunk.type) else chunk for chunk in chunks]
    column = pa.chunked_array([chunk.cast(order_type) for chunk in chunks], order_type)
    ends = pa.compute.min_max(column)
    minimum, maximum = ends["min"], ends["max"]
    has_nan = False
    if pa.types.is_floating(order_type):
        has_nan = bool(pa.compute.any(pa.compute.is_nan(column)).as_py())
        if has_nan and np.isnan(minimum.as_py()):
            minimum = maximum = pa.scalar(None, order_type)
    return minimum, maximum, column.null_count, has_nan
