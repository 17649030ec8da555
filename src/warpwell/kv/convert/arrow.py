"""Parquet and Arrow files: their rows, such as data sets of Hugging Face (`ArrowSource`); a store (`to_parquet`)."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..._check import imported
from ...cache import batches_of
from ...errors import ArgumentError, FormatError
from ...replacing import storage_full
from ..keys import Keys
from ..ragged import Ragged, numbers_of_lists
from ..schema import Field
from ..store import Store
from .sources import BATCH_BYTES, BATCH_RECORDS, IMAGE, Batch, Source, check_value, choose, require_names, rows_of

KEY, VALUE = "__key__", "value"
"""Columns of a dump: the keys, and the values of a store without a schema."""
_DUMPED = b"warpwell"
"""Metadata of a dump: schema and metadata of the store, in JSON."""
_BYTES = ("bytes", ())
_ADVICE = "leave it out with --fields"
_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"
_FILE_MAGIC = b"ARROW1"
_READ_BYTES = 1 << 20


class _Column(NamedTuple):
    """A field of a record, and the column, or the child of a struct column, that has its values."""

    column: str
    child: str | None
    spec: Any


class _Dump(NamedTuple):
    """The contents of a dump's metadata.

    Attributes
    ----------
    metadata : dict
        Metadata of the store.
    has_schema : bool
        Without a schema the column `VALUE` has the values.
    bytes_fields : set of str
        Names of the fields of bytes; the other ragged fields of uint8 are arrays.
    """

    metadata: dict[str, Any]
    has_schema: bool
    bytes_fields: set[str]


class ArrowSource(Source):
    """Rows of files with the same columns, which become the fields of a schema.

    Numbers, and lists of a fixed size, are arrays; other lists and bytes are ragged fields; text is text. A struct of
    ``bytes`` and ``path``, as Hugging Face stores images, is a field of bytes, and its path the field ``name``, empty
    if it is null. Names of classes come from Hugging Face's metadata. A dump of a store (`to_parquet`) has the same
    records as the store.

    Parameters
    ----------
    paths : list of pathlib.Path
        The files, in order: Parquet, Arrow streams or Arrow files.
    rule : str, optional
        One of `KEY_RULES`; names are the items of `key_field`. By default "name" if `key_field` is passed.
    key_field : str, optional
        Column of keys: integers, text or bytes. Rows are numbered by default, unless the file is a dump.
    fields : list of str, optional
        Columns to load; by default all except the keys.

    Raises
    ------
    ArgumentError
        A column does not exist, or the package ``pyarrow`` is missing.
    FormatError
        A file is damaged, files have different columns, a column cannot be stored, or values are missing.
    """

    def __init__(
        self, paths: list[Path], rule: str | None, key_field: str | None = None, fields: list[str] | None = None
    ) -> None:
        super().__init__(paths[0], rule or "name")
        self._pa, self._compute = imported("pyarrow", "table"), imported("pyarrow.compute", "table")
        self.paths = paths
        with paths[0].open("rb") as head:
            self.kind = "parquet" if head.read(4) == b"PAR1" else "arrow"
        with self._opened(paths[0]) as file:
            first = _schema(file)
        dump = _dump_of(first)
        if key_field is None and dump is not None and KEY in first.names:
            key_field = KEY
        require_names(rule, key_field, self.where)
        self._key = key_field
        if key_field is None:
            self.rule = "number"
        twice = [name for name in first.names if first.names.count(name) > 1]
        if twice:
            raise FormatError(f"{self.where} has two columns {twice[0]!r}: rename one of them", path=self.where)
        if key_field is not None:
            choose([key_field], first.names, self.where)
        chosen = [n for n in choose(fields, first.names, self.where) if n != key_field or fields]
        self._names = list(dict.fromkeys([*chosen, *([key_field] if key_field is not None else [])]))
        self._rows = [self._count(path, first) for path in paths]
        self.records = sum(self._rows)
        if not chosen or not self.records:
            raise FormatError(f"{self.where} has {self.records} rows and no column left for values", path=self.where)
        features = _features(first)
        self._columns: dict[str, _Column] = {}
        for name in chosen:
            feature = features.get(name, {})
            self._add(name, first.field(name).type, feature if isinstance(feature, dict) else {})
        if dump is not None:
            self.metadata = dump.metadata
            for name in self._columns.keys() & dump.bytes_fields:
                self._columns[name] = self._columns[name]._replace(spec=_BYTES)
        self._is_bytes = dump is not None and not dump.has_schema and list(self._columns) == [VALUE]
        self.schema = None if self._is_bytes else {name: column.spec for name, column in self._columns.items()}

    def batches(self, start: int = 0) -> Iterator[Batch]:
        """Read all rows from number `start` on."""
        done = 0
        for path, rows in zip(self.paths, self._rows, strict=True):
            skip = max(0, start - done)
            at = done + skip
            for table in self._read(path, skip) if skip < rows else ():
                yield from self._split(table, at, f"{path}: ")
                at += table.num_rows
            done += rows

    def _add(self, name: str, type: Any, feature: dict[str, Any]) -> None:
        """Add the fields of a column."""
        types = self._pa.types
        if types.is_struct(type) and {"bytes", "path"} <= {type.field(k).name for k in range(type.num_fields)}:
            self._columns[name] = _Column(name, "bytes", IMAGE)
            if "name" not in self._names and "name" not in self._columns:
                self._columns["name"] = _Column(name, "path", "str")
            return
        if feature.get("_type") == "ClassLabel" and feature.get("names"):
            self.metadata.setdefault("classes", {})[name] = list(feature["names"])
        shape = tuple(feature.get("shape") or ())
        if isinstance(type, self._pa.BaseExtensionType):
            type = type.storage_type
        for _ in shape:
            type = type.value_type
        spec = self._spec(type, f"{self.where}: {name}")
        self._columns[name] = _Column(name, None, (spec[0], shape) if shape else spec)

    def _spec(self, type: Any, where: str) -> Any:
        """Return the field of a schema for a type of Arrow."""
        types = self._pa.types
        if types.is_dictionary(type):
            return self._spec(type.value_type, where)
        if types.is_string(type) or types.is_large_string(type) or types.is_string_view(type):
            return "str"
        if any(
            check(type)
            for check in (types.is_binary, types.is_large_binary, types.is_binary_view, types.is_fixed_size_binary)
        ):
            return IMAGE
        if types.is_list(type) or types.is_large_list(type) or types.is_fixed_size_list(type):
            inner = self._spec(type.value_type, where)
            if isinstance(inner, tuple) and None not in inner[1]:
                return inner[0], (type.list_size if types.is_fixed_size_list(type) else None, *inner[1])
        elif types.is_boolean(type) or types.is_integer(type) or types.is_floating(type):
            return np.dtype(type.to_pandas_dtype()).name, ()
        raise ArgumentError(
            f"{where} is {type}, but a field is numbers, text, bytes or lists of numbers: choose columns with --fields",
            name="fields",
        )

    def _split(self, table: Any, start: int, where: str) -> Iterator[Batch]:
        """Yield the rows of a record batch, as many at a time as fit into memory."""
        values: dict[str, Any] = {}
        sizes = np.zeros(table.num_rows, np.int64)
        for name, column in self._columns.items():
            array = self._child(table.column(column.column), column.child, where + column.column, start)
            values[name], nbytes = self._values(array, column.spec, where + name)
            sizes += nbytes
        if len(sizes):
            check_value(int(sizes.max()), f"{where}row {start + int(sizes.argmax())}")
        keys = self._keys(table, start, where)
        if self._is_bytes:
            values[VALUE] = Ragged.from_arrow(values[VALUE])
        for rows in batches_of(sizes, BATCH_BYTES, BATCH_RECORDS):
            part = {name: column[rows] for name, column in values.items()}
            records = part[VALUE] if self._is_bytes else part
            yield Batch(keys[rows], records, int(sizes[rows].sum()), (start + rows.stop) / self.records)

    def _child(self, array: Any, child: str | None, where: str, start: int) -> Any:
        """Return the array of a field: the storage of an extension type, decoded, or a child of a struct."""
        if isinstance(array, self._pa.ExtensionArray):
            array = array.storage
        if self._pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        if child is not None:
            array = array.flatten()[array.type.get_field_index(child)]
            if child == "path":
                return array.fill_null("")
        if array.null_count:
            row = start + int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
            advice = "embed the files in the data set" if child else f"fill it, or {_ADVICE}"
            raise FormatError(f"{where} has no value in row {row}: {advice}", path=self.where)
        return array

    def _values(self, array: Any, spec: Any, where: str) -> tuple[Any, Any]:
        """Return a column for `Store.put_many`, and the size of each item, or one size for all items."""
        pa = self._pa
        if not pa.types.is_nested(array.type) and spec in ("str", IMAGE, _BYTES):
            array = array.cast(pa.large_string() if spec == "str" else pa.large_binary())
            return array, self._compute.binary_length(array).to_numpy()
        dtype, shape = np.dtype(spec[0]), spec[1]
        kind = pa.from_numpy_dtype(dtype)
        for extent in reversed(shape):
            kind = pa.large_list(kind) if extent is None else pa.list_(kind, extent)
        row_bytes = dtype.itemsize * math.prod(extent or 1 for extent in shape)
        try:
            array = array.cast(kind)
            if None not in shape:
                return numbers_of_lists(array), row_bytes
            column = Ragged.from_arrow(array)
        except pa.ArrowInvalid:
            lengths = " and ".join(str(extent) for extent in shape if extent is not None)
            text = f"{where} has lists of other lengths than {lengths}: {_ADVICE}"
            raise FormatError(text, path=self.where) from None
        except ArgumentError:
            text = f"{where} has lists with missing items: fill them, or {_ADVICE}"
            raise FormatError(text, path=self.where) from None
        return column, column.lengths * row_bytes

    def _keys(self, table: Any, start: int, where: str) -> Any:
        if self._key is None:
            return np.arange(start, start + table.num_rows)
        where += self._key
        spec = self._spec(table.schema.field(self._key).type, where)
        array = self._child(table.column(self._key), None, where, start)
        if self._pa.types.is_nested(array.type):
            raise FormatError(f"{where} is {array.type}: keys are integers, text or bytes", path=self.where)
        if spec in ("str", IMAGE):
            names = array.cast(self._pa.large_binary()).to_pylist()
            return self.keys_from_names(names, start, where)
        return self.keys_from_column(self._values(array, spec, where)[0], start, where)

    # -- files -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _opened(self, path: Path) -> Iterator[Any]:
        """Open a file with pyarrow; raise FormatError for its errors. Arrow's files are mapped."""
        try:
            if self.kind == "parquet":
                options = {"pre_buffer": False, "buffer_size": _READ_BYTES, "page_checksum_verification": True}
                with imported("pyarrow.parquet", "table").ParquetFile(path, **options) as file:
                    yield file
                return
            with self._pa.memory_map(str(path)) as mapped:
                is_file = mapped.read(len(_FILE_MAGIC)) == _FILE_MAGIC
                mapped.seek(max(0, mapped.size() - len(_STREAM_END)))
                if not is_file and mapped.read() != _STREAM_END:
                    raise FormatError(f"{path} is truncated: it has no end mark; get the file again", path=path)
                mapped.seek(0)
                ipc = imported("pyarrow.ipc", "table")
                yield (ipc.open_file if is_file else ipc.open_stream)(mapped)
        except (self._pa.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise FormatError(f"{path} cannot be read ({error}): get the file again", path=path) from None

    def _count(self, path: Path, first: Any) -> int:
        """Return the number of rows of a file; raise FormatError if its columns differ from the first file's."""
        with self._opened(path) as file:
            schema = _schema(file)
            for name in self._names:
                found = schema.field(name).type if schema.get_field_index(name) >= 0 else "missing"
                if found != first.field(name).type:
                    raise FormatError(
                        f"{path}: the column {name} is {found}, but {first.field(name).type} in {self.paths[0]}: "
                        f"load files with the same columns, or {_ADVICE}",
                        path=path,
                    )
            if self.kind == "parquet":
                return int(file.metadata.num_rows)
            return sum(batch.num_rows for batch in _ipc_batches(file))

    def _read(self, path: Path, skip: int) -> Iterator[Any]:
        """Yield the record batches of a file without its first `skip` rows."""
        with self._opened(path) as file:
            if self.kind == "parquet":
                groups = [file.metadata.row_group(k) for k in range(file.metadata.num_row_groups)]
                step = rows_of(sum(group.total_byte_size for group in groups) // max(1, file.metadata.num_rows))
                first = 0
                while skip >= groups[first].num_rows:
                    skip -= groups[first].num_rows
                    first += 1
                batches = file.iter_batches(step, list(range(first, len(groups))), self._names)
            else:
                batches = (batch.select(self._names) for batch in _ipc_batches(file))
            for batch in batches:
                cut = min(skip, batch.num_rows)
                skip -= cut
                for begin in range(cut, batch.num_rows, BATCH_RECORDS):
                    table = batch.slice(begin, BATCH_RECORDS)
                    table.validate(full=True)
                    yield table


def _schema(file: Any) -> Any:
    return file.schema_arrow if hasattr(file, "schema_arrow") else file.schema


def _ipc_batches(file: Any) -> Iterator[Any]:
    """Yield the record batches of an Arrow file or stream."""
    if hasattr(file, "get_batch"):
        return (file.get_batch(number) for number in range(file.num_record_batches))
    return iter(file)


def _features(schema: Any) -> dict[str, Any]:
    """Return the features that Hugging Face's ``datasets`` has written into the metadata of a schema."""
    try:
        return dict(json.loads(schema.metadata[b"huggingface"])["info"]["features"])
    except (TypeError, KeyError, ValueError):
        return {}


def data_set_files(folder: Path) -> list[Path]:
    """Return the Arrow files that ``save_to_disk`` wrote into a folder.

    Raises
    ------
    FormatError
        The folder's list of files is damaged, or another file selects rows.
    """
    try:
        state = json.loads((folder / "state.json").read_bytes())
        names = [item["filename"] for item in state["_data_files"]]
        selected = state.get("_indices_data_files") or state.get("_indices_files")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise FormatError(f"{folder}/state.json is damaged ({error}): save the data set again", path=folder) from None
    if selected or not names:
        raise FormatError(
            f"{folder} selects rows of a data set: call flatten_indices() and save_to_disk() again", path=folder
        )
    return [folder / name for name in names]


# -- dumps -------------------------------------------------------------------------------------------------------------


def to_parquet(store: Store, path: Path, progress: Callable[[str, int, int], object]) -> tuple[int, int]:
    """Write all records of a store as the rows of a Parquet file, in bounded memory; return their number and size.

    The column `KEY` has the keys, in the order of `Store.list`: integers if all of them are, otherwise bytes. Each
    field of the schema is a column; without a schema the column `VALUE` has the values. `ArrowSource` reads it back.

    Raises
    ------
    ArgumentError
        The package ``pyarrow`` is missing, Arrow has no type for a field, or the store was changed during the dump.
    StorageFullError
        No space is left; remove the file at `path`.
    """
    parquet = imported("pyarrow.parquet", "table")
    keys = store.ordered()
    sizes = store._records.sizes(keys)
    described = {"schema": None if store.schema is None else store.schema.to_json(), "metadata": store.metadata}
    schema = _rows_of(store, keys, slice(0)).schema.with_metadata({_DUMPED: json.dumps(described)})
    with storage_full(path), path.open("wb") as file, parquet.ParquetWriter(file, schema) as writer:
        for rows in batches_of(sizes, BATCH_BYTES, BATCH_RECORDS):
            writer.write_table(_rows_of(store, keys, rows))
            progress("write", rows.stop, keys.size)
    return keys.size, int(sizes.sum())


def _rows_of(store: Store, keys: Keys, rows: slice) -> Any:
    """Return some records as an Arrow table."""
    pa, part = imported("pyarrow", "table"), keys.take(rows)
    values, found = store.get_many(part)
    if not found.all():
        raise ArgumentError(
            f'{store.path} was changed during the dump: dump it again, or through a store open with mode "r"'
        )
    if keys.all_integers:
        columns = {KEY: pa.array(part.numbers())}
    else:
        columns = {KEY: pa.array([part.raw(k) for k in range(part.size)], pa.large_binary())}
    if store.schema is None:
        columns[VALUE] = pa.array(values, pa.large_binary())
    for field in () if store.schema is None else store.schema.fields:
        if field.name == KEY:
            raise ArgumentError(f"the column {KEY!r} of a dump has the keys: rename the field", name="fields")
        try:
            columns[field.name] = _column_of(field, values[field.name])
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ArgumentError):
            raise ArgumentError(
                f"Arrow has no type for the field {field.name!r}, which is {field.type_name} {field.shape}: copy the "
                "other fields into a new store, and dump it",
                name="fields",
            ) from None
    return pa.table(columns)


def _column_of(field: Field, values: Any) -> Any:
    """Return a field of records as an Arrow array; bytes and ragged uint8 are binaries."""
    pa = imported("pyarrow", "table")
    if not field.is_ragged:
        items = pa.array(values.reshape(-1))
        for extent in reversed(field.shape):
            items = pa.FixedSizeListArray.from_arrays(items, extent)
        return items
    if field.item_type is np.ndarray and field.dtype == np.uint8 and field.shape == IMAGE[1]:
        values = Ragged(values.values, values.offsets, bytes)
    return values.to_arrow()


def _dump_of(schema: Any) -> _Dump | None:
    """Return the `_Dump` that `to_parquet` has written into the metadata of a schema, or None."""
    try:
        described = json.loads(schema.metadata[_DUMPED])
        fields, metadata = described["schema"], dict(described["metadata"])
        return _Dump(metadata, fields is not None, {name for name, kind, _ in fields or () if kind == "bytes"})
    except (TypeError, KeyError, ValueError):
        return None
