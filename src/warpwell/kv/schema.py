"""Values: bytes of any length, or, with a `Schema`, records of named fields: numbers, arrays, bytes and strings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import errors
from ..targets.primitives import copy_bytes, load_weak_as, store_weak_as
from .index.reader import ValueBuffer, clear
from .keys import Keys, require_no_padding, shown
from .log.format import MAX_VALUE, UNIT
from .log.segments import ValueBuffers, too_large
from .native import INT64, UINT8, UINT32, address_of, compiled
from .ragged import Ragged, copy_items, numbers_of_lists

ALIGNMENT = 8
"""Alignment in bytes of the start of each field, and of the end of records without ragged fields."""

LENGTH_BYTES = 4
"""Size in bytes of the integer in a record that holds the length of a ragged field."""

_KINDS = "biufc"


@dataclass(frozen=True)
class Field:
    """One named field of a record.

    Attributes
    ----------
    name : str
    dtype : numpy.dtype
        The dtype of the items; uint8 for bytes and strings.
    shape : tuple of int
        The shape of the field in one record; ``()`` for a scalar. The first extent of a ragged field is None.
    offset : int
        Byte of the record where the field starts; for a ragged field, the byte where its length is stored.
    item_type : {numpy.ndarray, bytes, str}
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[Any, ...]
    offset: int
    item_type: type = np.ndarray

    @property
    def is_ragged(self) -> bool:
        """Whether each record has its own length."""
        return self.shape[:1] == (None,)

    @property
    def nbytes(self) -> int:
        """Size in bytes of the field, or of one row of a ragged field."""
        return int(self.dtype.itemsize * math.prod(self.shape[self.is_ragged :]))

    @property
    def type_name(self) -> str:
        """The name of the dtype; "bytes" or "str"."""
        return self.dtype.name if self.item_type is np.ndarray else self.item_type.__name__


class RecordError(ValueError):
    """The lengths in a record differ from its size; `row` is its position in the batch."""

    def __init__(self, row: int = 0) -> None:
        super().__init__(row)
        self.row = row


class Schema:
    """The named fields of every value of a store.

    Parameters
    ----------
    fields : mapping of str to (dtype, shape)
        For example ``{"x": ("uint8", (8, 8)), "y": "int64", "image": ("uint8", (None,)), "name": "str"}``. Dtypes are
        numbers and booleans of native byte order, "bytes" and "str". If the first extent of a shape is None, the field
        is *ragged*: each record has its own length along this axis. Bytes and strings (UTF-8) are ragged, too.

    Attributes
    ----------
    fields : tuple of Field
    ragged : tuple of Field
        The ragged fields.
    nbytes : int
        Size of a record in bytes, a multiple of 8; if there are ragged fields, the size of the part before their
        contents.
    record : numpy.dtype
        This part of a record as a structured dtype, without the lengths of ragged fields.

    Raises
    ------
    SchemaError
        There are no fields, a dtype or shape is not supported, or a record is larger than the maximum for values.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        if not isinstance(fields, Mapping) or not fields:
            raise errors.SchemaError(
                f"schema is {fields!r}: name at least one field, as in {{'x': ('uint8', (8, 8)), 'y': ('int64', ())}}"
            )
        listed: list[Field] = []
        lengths: list[int] = []
        offset = 0
        for name, spec in fields.items():
            field = _field(name, spec, offset)
            if field.is_ragged:
                lengths.append(len(listed))
            else:
                offset += _aligned(field.nbytes)
            listed.append(field)
        for k, position in enumerate(lengths):
            listed[position] = replace(listed[position], offset=offset + LENGTH_BYTES * k)
        offset += _aligned(LENGTH_BYTES * len(lengths))
        if offset > MAX_VALUE:
            raise errors.SchemaError(
                f"a record of this schema has {offset} bytes, but a value has at most {MAX_VALUE}: split it"
            )
        self.fields = tuple(listed)
        self.ragged = tuple(f for f in listed if f.is_ragged)
        self._row_bytes = np.array([field.nbytes for field in self.ragged], np.int64)
        self.nbytes = offset
        self.template = dict.fromkeys(f.name for f in listed)
        arrays = [f for f in listed if f.item_type is np.ndarray]
        self.is_only_bytes = not arrays
        self.finish = partial(
            _finish,
            [
                (f.name, f.dtype, math.prod(f.shape), f.offset, f.shape)
                if not f.is_ragged
                else (f.name, f.dtype, -1, -1, (-1, *f.shape[1:]))
                for f in arrays
            ],
        )
        fixed = [f for f in listed if not f.is_ragged]
        self.record: np.dtype[Any] = np.dtype(
            {
                "names": [f.name for f in fixed],
                "formats": [(f.dtype, f.shape) for f in fixed],
                "offsets": [f.offset for f in fixed],
                "itemsize": offset,
            }
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schema) and self.fields == other.fields

    def __hash__(self) -> int:
        return hash(self.fields)

    def __repr__(self) -> str:
        inside = ", ".join(f"{f.name!r}: ({f.type_name!r}, {f.shape})" for f in self.fields)
        return f"Schema({{{inside}}})"

    # -- the manifest ---------------------------------------------------------------------------------------

    def to_json(self) -> list[Any]:
        """Return the fields for a JSON file."""
        return [[f.name, f.dtype.str if f.item_type is np.ndarray else f.type_name, list(f.shape)] for f in self.fields]

    @classmethod
    def from_json(cls, data: Any) -> Schema:
        """Return the schema from the result of `to_json`.

        Raises
        ------
        SchemaError
            The data is not a schema.
        """
        try:
            fields = {name: (dtype, tuple(shape)) for name, dtype, shape in data}
        except (TypeError, ValueError):
            raise errors.SchemaError(f"a manifest has the invalid schema {data!r}: restore it from a copy") from None
        return cls(fields)

    # -- records --------------------------------------------------------------------------------------------

    def pack(self, values: Any, count: int) -> NDArray[np.uint8] | Ragged:
        """Pack the fields of `count` records.

        Parameters
        ----------
        values : mapping of str to array
            Each of shape ``(count, *shape)`` and of the field's dtype; lists are converted, and so are Arrow arrays of
            lists of a fixed size. A ragged field is a list of items, a `Ragged`, or an Arrow array.
        count : int

        Returns
        -------
        numpy.ndarray or Ragged
            uint8 [count, nbytes], C order; with ragged fields the records as uint8 items.

        Raises
        ------
        SchemaError
            Fields, dtypes or shapes differ from the schema.
        ValueSizeError
            A record is larger than the maximum for values.
        """
        self._check_names(values)
        out = np.zeros(count, self.record)
        for field in self.fields:
            if not field.is_ragged:
                out[field.name] = _checked(field, values[field.name], (count, *field.shape))
        rows = out.view(np.uint8).reshape(count, self.nbytes)
        if not self.ragged:
            return rows
        columns = [_column(field, values[field.name], count) for field in self.ragged]
        positions, sizes = [], np.full(count, self.nbytes, np.int64)
        for field, column in zip(self.ragged, columns, strict=True):
            _length_of(rows, field)[:] = column.lengths
            positions.append(_aligned(sizes))
            sizes = positions[-1] + column.lengths * field.nbytes
        if count and int(sizes.max()) > MAX_VALUE:
            raise too_large(int(sizes.max()), f"record {int(sizes.argmax())} of the batch")
        padded = _aligned(sizes, UNIT)
        starts = np.cumsum(padded) - padded
        records = np.empty(int(padded.sum()), np.uint8)
        records.reshape(-1, UNIT)[(starts + padded) // UNIT - 1] = 0  # the gaps after records and between fields
        for position in positions:
            records.view(np.int64)[(starts + position) // ALIGNMENT - 1] = 0
        fixed_sizes = np.full(count, self.nbytes, np.int64)
        Ragged.of_pieces(rows.reshape(-1), np.arange(count) * self.nbytes, fixed_sizes).copy_to(records, starts)
        for column, position in zip(columns, positions, strict=True):
            column.copy_to(records, starts + position)
        packed = Ragged.of_pieces(records, starts, sizes)
        packed._is_padded = True
        return packed

    def pack_one(self, value: Any) -> Any:
        """Pack the fields of one record into bytes or uint8 [1, nbytes]; arrays have their field's shape."""
        self._check_names(value)
        out = np.zeros(1, self.record)
        rows = out.view(np.uint8).reshape(1, self.nbytes)
        contents, size = [rows.tobytes()], self.nbytes
        for field in self.fields:
            if not field.is_ragged:
                out[field.name][0] = _checked(field, value[field.name], field.shape)
                continue
            raw, length = _item(field, value[field.name])
            if length >= 1 << 8 * LENGTH_BYTES:
                raise too_large(length * field.nbytes, "a record")
            _length_of(rows, field)[:] = length
            contents += [bytes(-size % ALIGNMENT), raw]
            size = _aligned(size) + length * field.nbytes
        if not self.ragged:
            return rows
        if size > MAX_VALUE:
            raise too_large(size, "a record")
        contents[0] = rows.tobytes()
        return b"".join(contents)

    def unpack(self, rows: NDArray[np.uint8], names: Sequence[str] | None = None) -> dict[str, Any]:
        """Return fields of fixed size (uint8 [N, nbytes], C order) as views, each ``(N, *shape)``; all by default."""
        chosen = [name for name in self.record.names or () if names is None or name in names]
        if not chosen:
            return {}
        records = rows.reshape(-1).view(self.record)
        return {name: records[name] for name in chosen}

    def unpack_ragged(self, values: ValueBuffer, names: Sequence[str] | None = None) -> dict[str, Any]:
        """Return the fields of records in one buffer: arrays ``(N, *shape)``, and `Ragged` views of the buffer.

        Parameters
        ----------
        values : ValueBuffer
            The records. Absent records have zeros in arrays, and empty items in ragged fields.
        names : sequence of str, optional
            The fields to return; all by default.

        Raises
        ------
        RecordError
            The lengths in a record differ from its size.
        """
        count, ragged = len(values.starts), len(self.ragged)
        rows = np.empty(count * self.nbytes // ALIGNMENT, np.int64)
        positions = np.empty((2, ragged, count), np.int64)
        arrays: tuple[NDArray[Any], ...] = (
            values.buffer,
            values.starts,
            values.sizes,
            values.found,
            rows,
            self._row_bytes,
            positions,
        )
        wrong = compiled(_lay_out)(*map(address_of, arrays), count, ragged, self.nbytes, self.ragged[0].offset)
        if wrong:
            raise RecordError(wrong - 1)
        fields = dict.fromkeys(self.template if names is None else filter(set(names).__contains__, self.template))
        fields.update(self.unpack(rows, names))
        for field, begins, lengths in zip(self.ragged, *positions, strict=True):
            if field.name in fields:
                source, itemsize = values.buffer, field.dtype.itemsize
                if field.dtype != source.dtype:
                    source, begins = source.view(field.dtype), begins // itemsize
                fields[field.name] = Ragged.of_pieces(source, begins, lengths, field.shape[1:], field.item_type)
        return fields

    def unpack_one(self, raw: bytes) -> dict[str, Any]:
        """Return the fields of one record: arrays of their shapes, scalars for ``()``, bytes and strings.

        Raises
        ------
        RecordError
            The lengths in the record differ from its size.
        """
        if len(raw) < self.nbytes:
            raise RecordError
        record: dict[Any, Any] = {**self.template, None: raw}
        end = self.nbytes
        for field in self.ragged:
            start, length = _aligned(end), int.from_bytes(raw[field.offset : field.offset + LENGTH_BYTES], "little")
            end = start + length * field.nbytes
            contents = raw[start:end]
            record[field.name] = contents.decode() if field.item_type is str else contents
        if end != len(raw):
            raise RecordError
        return self.finish(record)

    def accepts(self, raw: bytes) -> bool:
        """Return whether bytes are a record of this schema."""
        if self.ragged:
            try:
                self.unpack_one(raw)
            except ValueError:  # the lengths differ, or a string is not UTF-8
                return False
        return bool(self.ragged) or len(raw) == self.nbytes

    def check_names(self, names: Any) -> list[str]:
        """Return names of fields as a list; raise SchemaError if the schema lacks one of them."""
        chosen = [names] if isinstance(names, str) else list(names)
        for name in chosen:
            if name not in {f.name for f in self.fields}:
                raise _field_error(name, f"is not in the schema, which has {[f.name for f in self.fields]}")
        return chosen

    def _check_names(self, values: Any) -> None:
        if not isinstance(values, Mapping):
            raise errors.SchemaError(
                f"values of type {type(values).__name__} for a store with a schema: pass a dict of"
                f" {[f.name for f in self.fields]}"
            )
        names = {f.name for f in self.fields}
        for name in names - set(values):
            raise _field_error(name, f"is missing: the schema has {sorted(names)}")
        for name in set(values) - names:
            raise _field_error(name, f"is not in the schema, which has {sorted(names)}: leave it out")


def _finish(arrays: list[tuple[Any, ...]], record: dict[Any, Any]) -> dict[str, Any]:
    """Complete a dict that has the contents of ragged fields, and under None the fixed part of the record.

    Each array has a name, a dtype, a count, the offset in the fixed part (negative for a ragged field), and a shape.
    """
    fixed = record.pop(None)
    for name, dtype, count, offset, shape in arrays:
        if offset < 0:
            record[name] = np.frombuffer(record[name], dtype).reshape(shape)
        else:
            values = np.frombuffer(fixed, dtype, count, offset)
            record[name] = values.reshape(shape) if shape else values[0]
    return record


def as_schema(schema: Schema | Mapping[str, Any] | None) -> Schema | None:
    """Return a caller's schema, passed as a `Schema` or as a mapping, as a `Schema`."""
    return schema if schema is None or isinstance(schema, Schema) else Schema(schema)


def _field_error(name: Any, problem: str) -> errors.SchemaError:
    return errors.SchemaError(f"field {name!r} {problem}", field=str(name))


def _field(name: Any, spec: Any, offset: int) -> Field:
    if not isinstance(name, str) or not name:
        raise errors.SchemaError(f"a field is named {name!r}: use strings of one character or more")
    if isinstance(spec, (str, np.dtype, type)):
        spec = (spec, ())
    if isinstance(spec, Sequence) and len(spec) == 2 and spec[0] in ("str", str, "bytes", bytes):
        if spec[1] not in ((), (None,), [], [None]):
            raise _field_error(name, f"is {spec!r}: omit the shape, which strings and bytes do not have")
        return Field(name, np.dtype(np.uint8), (None,), offset, str if spec[0] in ("str", str) else bytes)
    if not isinstance(spec, Sequence) or len(spec) != 2:
        raise _field_error(name, f"is {spec!r}: pass (dtype, shape)")
    try:
        dtype = np.dtype("None" if spec[0] is None else spec[0])  # NumPy treats None as float64
    except TypeError:
        raise _field_error(
            name,
            f"has dtype {spec[0]!r}, which NumPy does not know: name one like 'float32', or 'uint16' for"
            " the bits of a bfloat16",
        ) from None
    if dtype.kind not in _KINDS or not dtype.isnative or dtype.itemsize not in (1, 2, 4, 8):
        raise _field_error(
            name,
            f"has dtype {dtype}: fields are booleans or numbers of 1, 2, 4 or 8 bytes, native order,"
            " 'bytes' or 'str' ('uint16' holds the bits of a bfloat16)",
        )
    raw = spec[1]
    shape = (raw,) if isinstance(raw, int) else raw
    extents = shape[1:] if isinstance(shape, Sequence) and shape[:1] in ((None,), [None]) else shape
    if not isinstance(shape, Sequence) or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in extents):
        raise _field_error(name, f"has shape {raw!r}: pass positive integers, or (), or None first for a ragged field")
    return Field(name, dtype, tuple(shape), offset)


def _checked(field: Field, value: Any, shape: tuple[Any, ...]) -> NDArray[Any]:
    typed = hasattr(value, "dtype")
    nulls = getattr(value, "null_count", 0)  # Arrow and Polars have nulls, which NumPy would convert to NaN
    if nulls() if callable(nulls) else nulls:
        raise _field_error(field.name, "has nulls, but records have a value in each field: fill or drop the nulls")
    try:
        is_list = str(getattr(value, "type", "")).startswith("fixed_size_list")  # of pyarrow
        array = numbers_of_lists(value) if is_list else np.asarray(value)
    except (TypeError, ValueError, errors.ArgumentError) as error:
        raise _field_error(field.name, f"is not an array: {error}") from None
    typed = typed or is_list
    if typed and array.dtype != field.dtype:
        raise _field_error(
            field.name,
            f"has dtype {array.dtype}, but the schema has {field.dtype}: convert it with astype({field.dtype.name!r})",
        )
    expected = shape
    if shape[:1] == (None,):
        if not typed and array.shape == (0,):
            return np.empty((0, *shape[1:]), field.dtype)
        shape = (len(array), *shape[1:]) if array.ndim else shape
    if array.shape != shape:
        raise _field_error(
            field.name, f"has shape {array.shape}, but {expected} is expected: reshape it, or check the number of keys"
        )
    if array.dtype == field.dtype:
        return array
    # Lists: every item must mean the same number in the field's dtype.
    if array.dtype.kind not in _KINDS:
        raise _field_error(field.name, f"holds {array.dtype}, not numbers: convert it")
    is_exact = array.dtype.kind != "c" or field.dtype.kind == "c"
    if is_exact:
        with np.errstate(all="ignore"):
            converted = array.astype(field.dtype)
        if field.dtype.kind in "fc":
            is_exact = np.array_equal(np.isfinite(converted), np.isfinite(array))
        else:
            is_exact = np.array_equal(converted, array)
    if not is_exact:
        raise _field_error(field.name, f"holds a value that does not fit {field.dtype}: check it, or widen the schema")
    return converted


class _Pieces:
    """Items of a ragged field, each in its own buffer."""

    def __init__(self, field: Field, items: Iterable[Any]) -> None:
        self._buffers = ValueBuffers.of([_item(field, item)[0] for item in items])
        self.lengths = self._buffers.sizes // field.nbytes

    def copy_to(self, target: NDArray[Any], positions: NDArray[np.int64]) -> None:
        """Copy the items to byte positions in `target`, which has room for them."""
        copy_items(self._buffers.addresses, self._buffers.sizes, target, positions)


def _column(field: Field, value: Any, count: int) -> Ragged | _Pieces:
    """Return the items of a ragged field, checked."""
    column = _as_ragged(field, value)
    if len(column.lengths) != count:
        raise _field_error(field.name, f"has {len(column.lengths)} items for {count} keys: pass one for each")
    if isinstance(column, _Pieces):
        return column
    is_same_type = column.item_type is field.item_type or str not in (column.item_type, field.item_type)
    if not is_same_type or column.dtype != field.dtype or column.item_shape != field.shape[1:]:
        raise _field_error(field.name, f"is {column!r}, not {field.type_name} {field.shape}: convert it")
    if field.item_type is str:
        _check_text(field, column)
    return column


def _as_ragged(field: Field, value: Any) -> Ragged | _Pieces:
    if isinstance(value, Ragged):
        return value
    if isinstance(value, (str, bytes, bytearray, Mapping)) or not isinstance(value, Iterable):
        raise _field_error(
            field.name, f"is a single {type(value).__name__}: pass a list of items, a Ragged or an Arrow array"
        )
    try:
        if hasattr(value, "__arrow_c_array__") or hasattr(value, "__arrow_c_stream__"):
            return Ragged.from_arrow(value)
        require_no_padding(value, "the column")
    except errors.ArgumentError as error:
        raise errors.SchemaError(f"field {field.name!r}: {error}", field=field.name) from None
    return _Pieces(field, value)


def _item(field: Field, value: Any) -> tuple[Any, int]:
    """Return the contents of one item of a ragged field, and its length."""
    if field.item_type is str:
        if not isinstance(value, str):
            raise _field_error(field.name, f"is {value!r:.60}: pass a string")
        try:
            raw = value.encode()
        except UnicodeEncodeError as error:
            raise _field_error(
                field.name,
                f"is {value!r:.60}, which UTF-8 cannot encode ({error.reason}): remove the lone"
                " surrogates, or use a field of bytes",
            ) from None
        return raw, len(raw)
    if isinstance(value, (bytes, bytearray)) and field.nbytes == 1 and field.dtype.kind == "u":
        return value, len(value)
    if value is None or isinstance(value, str):
        expected = "bytes" if field.nbytes == 1 else f"an array or a list of {field.dtype}"
        raise _field_error(field.name, f"is {value!r:.60}: pass {expected}")
    array = np.ascontiguousarray(_checked(field, value, field.shape))
    return array.reshape(-1).view(np.uint8), len(array)


def _check_text(field: Field, column: Ragged) -> None:
    """Raise SchemaError unless each item is UTF-8: the whole buffer is, and no item begins inside of a character."""
    values = column.values
    starts = column.offsets[:-1][column.lengths > 0]
    try:
        if (values[starts] & 0xC0 == 0x80).any():
            raise ValueError("an item begins inside of a character")
        str(values.data, "utf-8")
    except ValueError as error:
        raise _field_error(field.name, f"is not UTF-8 ({error}): use a field of bytes") from None


def _length_of(rows: NDArray[np.uint8], field: Field) -> NDArray[np.uint32]:
    """Return the lengths of a ragged field in records, as a view."""
    return rows[:, field.offset : field.offset + LENGTH_BYTES].view(np.uint32)[:, 0]


def _aligned(size: Any, unit: int = ALIGNMENT) -> Any:
    """Return the next multiple of `unit` (of integers, or of arrays of them)."""
    return -(-size // unit) * unit


def _lay_out(buffer, starts, sizes, found, rows, row_bytes, positions, count, fields, nbytes, lengths_at):  # type: ignore[no-untyped-def]
    """Copy the fixed parts of records to `rows`, and write where their ragged fields begin, and their lengths.

    Returns the number of records up to the first one whose lengths are wrong, 0 if all are right.
    """
    lengths = positions + 8 * fields * count
    for k in range(count):
        start = load_weak_as(starts + 8 * k, INT64)
        size = load_weak_as(sizes + 8 * k, INT64)
        end = nbytes
        if load_weak_as(found + k, UINT8) == 0:
            clear(rows + nbytes * k, nbytes)
            for field in range(fields):
                store_weak_as(positions + 8 * (field * count + k), 0, INT64)
                store_weak_as(lengths + 8 * (field * count + k), 0, INT64)
            continue
        if size < nbytes:
            return k + 1
        copy_bytes(rows + nbytes * k, buffer + start, nbytes)
        for field in range(fields):
            length = load_weak_as(buffer + start + lengths_at + 4 * field, UINT32)
            end = (end + 7) & ~7
            store_weak_as(positions + 8 * (field * count + k), start + end, INT64)
            store_weak_as(lengths + 8 * (field * count + k), length, INT64)
            end += length * load_weak_as(row_bytes + 8 * field, INT64)
            if end > size:
                return k + 1
        if end != size:
            return k + 1
    return 0


def one_value(value: Any, key: Any) -> Any:
    """Return a value as bytes or a flat view of bytes."""
    if type(value) is not bytes:
        if isinstance(value, (str, int, float, np.number, np.bool_)) or value is None:
            raise errors.ArgumentError(
                f"the value of key {shown(key)!r} is of type {type(value).__name__}: pass bytes or an array, or create"
                " the store with a schema",
                name="value",
            )
        try:
            view = memoryview(value)
            if _holds_addresses(value, view):
                raise errors.ArgumentError(
                    f"the value of key {shown(key)!r} holds Python objects or pointers, which mean nothing on disk:"
                    " pass bytes (pickle.dumps(value), say) or an array of numbers",
                    name="value",
                )
            value = view.cast("B")
        except errors.ArgumentError:
            raise
        except (TypeError, BufferError, ValueError):
            raise errors.ArgumentError(
                f"the value of key {shown(key)!r} is of type {type(value).__name__}: pass bytes or an array in C order",
                name="value",
            ) from None
    if len(value) > MAX_VALUE:
        raise errors.ValueSizeError(
            f"the value of key {shown(key)!r} has {len(value)} bytes, but a store accepts at most {MAX_VALUE}: "
            "split it",
            name="value",
            nbytes=len(value),
        )
    return value


def _holds_addresses(value: Any, view: memoryview) -> bool:
    dtype = getattr(value, "dtype", None)
    if isinstance(dtype, np.dtype):
        return bool(dtype.hasobject)
    return any(code in view.format for code in "OPzZ")  # codes of ctypes for objects, pointers, and pointers to strings


def many_values(values: Any, keys: Keys) -> Any:
    """Return values in the form for the log: a list of buffers, uint8 [N, nbytes], or Ragged of uint8."""
    if isinstance(values, (bytes, str, dict)) or not isinstance(values, Iterable | Ragged):
        raise errors.ArgumentError(
            f"values is a single {type(values).__name__}: pass a list of bytes or uint8 [N, nbytes], one for each key;"
            " dicts need a store with a schema",
            name="values",
        )
    if hasattr(values, "__arrow_c_array__") or hasattr(values, "__arrow_c_stream__"):
        values = Ragged.from_arrow(values)
    require_no_padding(values, "values")
    if isinstance(values, Ragged) and values.dtype == np.uint8 and not values.item_shape:
        packed: Any = values
        if (values.lengths > MAX_VALUE).any():
            raise too_large(int(values.lengths.max()))
    elif isinstance(values, np.ndarray) and values.ndim == 2 and values.dtype == np.uint8:
        packed = np.ascontiguousarray(values)
        if values.shape[1] > MAX_VALUE:
            one_value(packed[0], keys.row(0) if keys.size else b"")
    else:
        packed = list(values)
    if len(packed) != keys.size:
        raise errors.ArgumentError(f"{len(packed)} values for {keys.size} keys: pass one for each", name="values")
    if isinstance(packed, np.ndarray | Ragged) or all(type(v) is bytes and len(v) <= MAX_VALUE for v in packed):
        return packed
    return [one_value(v, keys.row(k)) for k, v in enumerate(packed)]


def row_bytes_of(out: Any, count: int, row_bytes: int | None = None) -> int:
    """Check the array `out`, into which values are read; return the size of its rows."""
    fine = (
        isinstance(out, np.ndarray)
        and out.ndim == 2
        and out.dtype == np.uint8
        and out.flags.c_contiguous
        and out.flags.writeable
    )
    if not fine or len(out) != count or (row_bytes is not None and out.shape[1] != row_bytes):
        size = "nbytes" if row_bytes is None else row_bytes
        raise errors.ArgumentError(f"out must be a writable uint8 array [{count}, {size}] in C order", name="out")
    return int(out.shape[1])
