"""`TableFolder`: a table in a folder of ``.npy`` files, one a buffer.

::

    trips.ww/
      table.json      version, rows, and the parts: their files, and the CRC-32C of each MiB behind the headers
      schema.arrow    an Arrow file without rows: names and types
      0/              what `convert` wrote; each `append` adds a folder
        3-distance.values.npy
        3-distance.valid.npy
        3-distance.statistics.npy

Files never change once ``table.json`` names them, which is replaced by rename: that commits. So whoever has a table
open keeps it, and a crash leaves the old one.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from ..array import read_npy
from ..errors import ClosedError, FormatError, StoreVersionError
from ..json_file import read_json
from ..kv import crc32c
from .column import ColumnRun, validate
from .column_files import HAS_NAN, HAS_NULL, STATISTICS_ROWS, statistics_dtype
from .extent import Extent, MappedFile
from .layout import Layout, layout_of, storage_of
from .library import arrow
from .zones import PartZones, ZoneMap

DESCRIPTION = "table.json"
SCHEMA = "schema.arrow"
FORMAT = "warpwell table"
VERSION = 1
_BYTE = np.dtype(np.uint8)
_NAME = re.compile(r"[A-Za-z0-9_-]+\.[a-z_]+\.npy")


def is_table_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a table's folder."""
    return os.path.isfile(os.path.join(path, DESCRIPTION))


def read_description(path: str) -> dict[str, Any]:
    """Return what ``table.json`` says, checked.

    Raises
    ------
    MissingFileError, FormatError, StoreVersionError
    """
    found = read_json(os.path.join(path, DESCRIPTION), "a folder of ww.table.convert")
    if found.get("format") != FORMAT:
        raise FormatError(f"{path} is not a table of Warpwell's: its {DESCRIPTION} has another format", path=path)
    version = found.get("version")
    if version != VERSION:
        raise StoreVersionError(
            f"{path} has version {version!r:.40}, and this Warpwell reads {VERSION}: install a "
            "newer one, or convert the source again",
            path=path,
        )
    wrong = _wrong(found)
    if wrong is not None:
        raise FormatError(f"{path}: {DESCRIPTION} is damaged ({wrong}): convert the source again", path=path)
    return found


def _wrong(found: dict[str, Any]) -> str | None:
    """Return what is wrong with a description, or None."""
    parts, columns = found.get("parts"), found.get("columns")
    if not isinstance(parts, list) or not _count(columns) or not _count(found.get("rows")):
        return "parts, columns or rows"
    for part in parts:
        if not isinstance(part, dict) or not _count(part.get("rows")) or not _count(part.get("folder")):
            return "a part's folder or rows"
        if not isinstance(part.get("columns"), list) or len(part["columns"]) != columns:
            return "a part's columns"
        for column in part["columns"]:
            if not isinstance(column, dict) or not _count(column.get("nulls")) or column["nulls"] > part["rows"]:
                return "a column's nulls"
            files = column.get("files")
            if not isinstance(files, dict) or not all(isinstance(one, dict) for one in files.values()):
                return "a column's files"
            if not all(isinstance(one.get("name"), str) and _NAME.fullmatch(one["name"]) for one in files.values()):
                return "a file's name"
            if not all(re.fullmatch("([0-9a-f]{8})*", str(one.get("crc32c"))) for one in files.values()):
                return "a file's checksums"
    if sum(part["rows"] for part in parts) != found["rows"]:
        return "rows of the parts"
    if len({part["folder"] for part in parts}) != len(parts):
        return "two parts in one folder"
    return None


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def read_schema(path: str, description: dict[str, Any]) -> Any:
    """Return the `pyarrow.Schema` of a folder; raise FormatError."""
    name = os.path.join(path, SCHEMA)
    pa = arrow()
    try:
        raw = Path(name).read_bytes()
        if crc32c(raw) != description.get("schema_crc32c"):
            raise FormatError(f"{name} is damaged: its checksum differs; convert the source again", path=name)
        schema = pa.ipc.open_file(pa.BufferReader(raw)).schema
    except (pa.ArrowException, FileNotFoundError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(
            f"{name} is missing or damaged ({str(error)[:100]}): convert the source again", path=name
        ) from None
    if len(schema) != description["columns"]:
        raise FormatError(
            f"{name} has {len(schema)} columns, and {DESCRIPTION} {description['columns']}: convert the source again",
            path=name,
        )
    return schema


class TableFolder:
    """The columns of a table's folder.

    Files are opened when a column is first used. They are those of the folder that was opened: if another has taken its
    place meanwhile, that is an error.

    Attributes
    ----------
    schema : pyarrow.Schema
    rows : int
    """

    def __init__(self, path: str, direct: bool | None = None) -> None:
        self._direct = direct
        self._path = os.path.abspath(path)
        self._folder = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)  # while it is open, no other has its number
        try:
            description = read_description(path)
            self.schema = read_schema(path, description)
        except BaseException:
            os.close(self._folder)
            raise
        self.rows: int = description["rows"]
        self._parts = description["parts"]
        self._files: dict[str, MappedFile] = {}
        self._closed = False

    def zones(self, number: int) -> tuple[PartZones, ...]:
        """Return the zone maps of a column, one for each part with rows."""
        return tuple(PartZones(run.first, run.rows, _zone_map(run)) for run in self.runs(number))

    def runs(self, number: int) -> tuple[ColumnRun, ...]:
        """Return the runs of a column, one a part with rows; raise FormatError."""
        field = self.schema.field(number)
        layout = layout_of(field.type, field.name)
        found, first = [], 0
        try:
            self._require_place()
            for part in self._parts:
                if part["rows"]:
                    folder = os.path.join(self._path, str(part["folder"]))
                    found.append(self._run(folder, first, part["rows"], part["columns"][number], field, layout))
                first += part["rows"]
        except (OSError, FormatError):
            self._require_open()  # another thread closes: a descriptor may be another file's by now
            raise
        self._require_open()
        return tuple(found)

    def _require_open(self) -> None:
        if self._closed:
            self._close_files()
            raise ClosedError(f"table {self._path} is closed: open it again")

    def _run(self, folder: str, first: int, rows: int, column: dict[str, Any], field: Any, layout: Layout) -> ColumnRun:
        files = column["files"]
        nulls = rows if layout.kind == "null" else column["nulls"]

        def extent(what: str, dtype: np.dtype[Any], shape: tuple[int, ...] | None) -> Extent | None:
            if what not in files:
                raise FormatError(
                    f"{folder}: column {field.name!r} has no file of {what}: convert the source again", path=folder
                )
            return self._extent(os.path.join(folder, files[what]["name"]), dtype, shape)

        given: dict[str, Any] = {}
        if nulls and layout.kind != "null":
            given["valid"] = extent("valid", _BYTE, (-(-rows // 8),))
        if "codes" in files:
            places = np.dtype(np.uint8 if self._codes_are_bytes(folder, files) else "<u2")
            given["codes"] = extent("codes", places, (rows,))
            given["dictionary"] = self._dictionary(extent, layout, field.type)
            layout = Layout("codes", places)
        elif layout.kind == "text":
            assert layout.dtype is not None
            given["offsets"] = extent("offsets", layout.dtype, (rows + 1,))
            given["bytes"] = extent("bytes", _BYTE, None)
        elif layout.dtype is not None:
            given["values"] = extent("values", layout.dtype, layout.shape(rows))
        if "statistics" in files and layout.dtype is not None:
            given["statistics"] = extent("statistics", statistics_dtype(layout.dtype), (-(-rows // STATISTICS_ROWS),))
        return ColumnRun(first, rows, nulls, field.type, layout, **given)

    def _codes_are_bytes(self, folder: str, files: dict[str, Any]) -> bool:
        path = os.path.join(folder, files["codes"]["name"])
        return bool(self._header(path)[1].dtype == _BYTE)

    def _dictionary(self, extent: Any, layout: Layout, kind: Any) -> Any:
        """Return the values of codes, copied into memory and checked."""
        pa = arrow()
        if layout.kind == "text":
            places = extent("dictionary_offsets", np.dtype("<i8"), None)
            buffers = [places.numpy(), extent("dictionary_bytes", _BYTE, None).numpy()]
            count = len(buffers[0]) - 1
        else:
            places = extent("dictionary", layout.dtype, None)
            buffers = [places.numpy()]
            count = len(buffers[0])
        if count < 0:
            raise FormatError(f"{places.path} has no offsets: convert the source again", path=places.path)
        found = pa.Array.from_buffers(kind, count, [None, *(pa.py_buffer(one.tobytes()) for one in buffers)])
        try:
            validate(found)
        except pa.ArrowException as error:
            raise FormatError(
                f"{places.path} is damaged ({str(error)[:100]}): convert the source again", path=places.path
            ) from None
        return found

    def _header(self, path: str) -> tuple[MappedFile, Any]:
        file = self._files.get(path)
        if file is None:
            opened = MappedFile(path, self._direct)
            file = self._files.setdefault(path, opened)
            if file is not opened:  # another thread was faster
                opened.close()
        return file, read_npy(Path(path), file.fileno())

    def _close_files(self) -> None:
        """Close all files, each once: a descriptor that is closed twice may be another file's by then."""
        while self._files:
            with contextlib.suppress(KeyError):  # another thread took the last
                self._files.popitem()[1].close()

    def _extent(self, path: str, dtype: np.dtype[Any], shape: tuple[int, ...] | None) -> Extent:
        """Return the array in a file, which has this dtype and shape; with None, any length."""
        file, header = self._header(path)
        wanted = header.shape if shape is None and len(header.shape) == 1 else shape
        if header.dtype != dtype or header.shape != wanted:
            raise FormatError(
                f"{path} has shape {header.shape} of {header.dtype}, and the table says {wanted} of {dtype}: convert "
                "the source again",
                path=path,
            )
        return Extent(file, header.origin, dtype, header.shape)

    def _require_place(self) -> None:
        """Raise FormatError if another folder has taken the place."""
        mine = os.fstat(self._folder)
        try:
            there = os.stat(self._path)
        except FileNotFoundError:
            there = None
        if there is None or (there.st_dev, there.st_ino) != (mine.st_dev, mine.st_ino):
            raise FormatError(
                f"{self._path} was replaced or removed since the table was opened: open it again", path=self._path
            )

    def require(self) -> None:
        """Raise MediumError if bytes could not be read."""
        for file in list(self._files.values()):
            file.require()

    def close(self) -> None:
        """Close all files; views stay valid."""
        if not self._closed:
            self._closed = True
            os.close(self._folder)
            self._close_files()


def _zone_map(run: ColumnRun) -> ZoneMap | None:
    extent = run.statistics
    if extent is None:
        return None
    records = extent.numpy().copy()
    extent.file.require()  # zeros of a file that was truncated would skip rows
    pa, absent = arrow(), records["least"] > records["greatest"]
    ends = []
    for end in ("least", "greatest"):
        items = np.ascontiguousarray(records[end])
        if run.codes is None:
            buffers = [pa.py_buffer(np.packbits(~absent, bitorder="little")), pa.py_buffer(items)]
            ends.append(pa.Array.from_buffers(storage_of(run.type), len(items), buffers))
        else:
            ends.append(run.dictionary.take(pa.array(items.astype(np.int64), mask=absent)))
    flags = records["flags"]
    return ZoneMap(ends[0], ends[1], (flags & HAS_NULL != 0).astype(np.int64), flags & HAS_NAN != 0)
