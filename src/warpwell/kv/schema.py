"""Values: bytes of any length, or, with a `Schema`, records of named arrays of fixed dtype and shape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import errors
from .keys import Keys, shown
from .log.format import MAX_VALUE

ALIGNMENT = 8
"""Bytes; each field starts at a multiple of it, and a record is as long as one."""

_KINDS = "biufc"


@dataclass(frozen=True)
class Field:
    """One named array of a record.

    Attributes
    ----------
    name : str
    dtype : numpy.dtype
    shape : tuple of int
        Of one record; ``()`` for a scalar.
    offset : int
        Where it starts in the record, in bytes.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))


class Schema:
    """The named arrays, of fixed dtype and shape, of every value of a store.

    Parameters
    ----------
    fields : mapping of str to (dtype, shape)
        For example ``{"x": ("uint8", (8, 8)), "y": ("int64", ())}``. Numbers and booleans of native byte order.

    Attributes
    ----------
    fields : tuple of Field
    nbytes : int
        Size of a record: a multiple of 8.
    record : numpy.dtype
        The record as a structured dtype.

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
        offset = 0
        for name, spec in fields.items():
            field = _field(name, spec, offset)
            listed.append(field)
            offset += -(-field.nbytes // ALIGNMENT) * ALIGNMENT
        if offset > MAX_VALUE:
            raise errors.SchemaError(
                f"a record of this schema has {offset} bytes where a value has at most {MAX_VALUE}: split it"
            )
        self.fields = tuple(listed)
        self.nbytes = offset
        self.record: np.dtype[Any] = np.dtype(
            {
                "names": [f.name for f in listed],
                "formats": [(f.dtype, f.shape) for f in listed],
                "offsets": [f.offset for f in listed],
                "itemsize": offset,
            }
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schema) and self.fields == other.fields

    def __hash__(self) -> int:
        return hash(self.fields)

    def __repr__(self) -> str:
        inside = ", ".join(f"{f.name!r}: ({f.dtype.name!r}, {f.shape})" for f in self.fields)
        return f"Schema({{{inside}}})"

    # -- the manifest ---------------------------------------------------------------------------------------

    def to_json(self) -> list[Any]:
        """Return the fields for a JSON file."""
        return [[f.name, f.dtype.str, list(f.shape)] for f in self.fields]

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
            raise errors.SchemaError(f"a manifest has the invalid schema {data!r}: was the manifest edited?") from None
        return cls(fields)

    # -- records --------------------------------------------------------------------------------------------

    def pack(self, values: Any, count: int) -> NDArray[np.uint8]:
        """Pack arrays of `count` rows into records.

        Parameters
        ----------
        values : mapping of str to array
            Each of shape ``(count, *shape)`` and of the field's dtype; lists are converted.
        count : int

        Returns
        -------
        numpy.ndarray
            uint8 [count, nbytes], C order.

        Raises
        ------
        SchemaError
            Fields, dtypes or shapes differ from the schema.
        """
        self._check_names(values)
        out = np.zeros(count, self.record)
        for field in self.fields:
            out[field.name] = _checked(field, values[field.name], (count, *field.shape))
        return out.view(np.uint8).reshape(count, self.nbytes)

    def pack_one(self, value: Any) -> NDArray[np.uint8]:
        """Pack the arrays of one record, each with its field's shape, into uint8 [1, nbytes]."""
        self._check_names(value)
        out = np.zeros(1, self.record)
        for field in self.fields:
            out[field.name][0] = _checked(field, value[field.name], field.shape)
        return out.view(np.uint8).reshape(1, self.nbytes)

    def unpack(self, rows: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
        """Return the fields of records (uint8 [N, nbytes], C order) as views, each ``(N, *shape)``."""
        records = rows.reshape(-1).view(self.record)
        return {f.name: records[f.name] for f in self.fields}

    def unpack_one(self, row: Any) -> dict[str, Any]:
        """Return the fields of one record (bytes), as arrays of their shapes, and scalars for ``()``."""
        record = np.frombuffer(row, self.record)[0]
        return {f.name: record[f.name] for f in self.fields}

    def _check_names(self, values: Any) -> None:
        if not isinstance(values, Mapping):
            raise errors.SchemaError(
                f"values of type {type(values).__name__} for a store with a schema: pass a dict of"
                f" {[f.name for f in self.fields]}"
            )
        names = {f.name for f in self.fields}
        for name in names - set(values):
            raise errors.SchemaError(f"field {name!r} is missing: the schema has {sorted(names)}", field=name)
        for name in set(values) - names:
            raise errors.SchemaError(
                f"field {name!r} is not in the schema, which has {sorted(names)}: leave it out", field=str(name)
            )


def as_schema(schema: Schema | Mapping[str, Any] | None) -> Schema | None:
    """Return a caller's schema, passed as a `Schema` or as a mapping, as a `Schema`."""
    return schema if schema is None or isinstance(schema, Schema) else Schema(schema)


def _field(name: Any, spec: Any, offset: int) -> Field:
    if not isinstance(name, str) or not name:
        raise errors.SchemaError(f"a field is named {name!r}: use strings")
    if isinstance(spec, (str, np.dtype, type)):
        spec = (spec, ())
    if not isinstance(spec, Sequence) or len(spec) != 2:
        raise errors.SchemaError(f"field {name!r} is {spec!r}: give (dtype, shape)", field=name)
    try:
        dtype = np.dtype(spec[0])
    except TypeError:
        raise errors.SchemaError(
            f"field {name!r} has dtype {spec[0]!r}, which NumPy does not know: name one like 'float32'", field=name
        ) from None
    if dtype.kind not in _KINDS or not dtype.isnative or dtype.itemsize not in (1, 2, 4, 8):
        raise errors.SchemaError(
            f"field {name!r} has dtype {dtype}: fields are booleans or numbers of 1, 2, 4 or 8 bytes, native order",
            field=name,
        )
    raw = spec[1]
    shape = (raw,) if isinstance(raw, int) else raw
    if not isinstance(shape, Sequence) or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in shape):
        raise errors.SchemaError(f"field {name!r} has shape {raw!r}: give positive integers, or ()", field=name)
    return Field(name, dtype, tuple(shape), offset)


def _checked(field: Field, value: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    typed = hasattr(value, "dtype")
    try:
        array = np.asarray(value)
    except (TypeError, ValueError) as error:
        raise errors.SchemaError(f"field {field.name!r} is not an array: {error}", field=field.name) from None
    if typed and array.dtype != field.dtype:
        raise errors.SchemaError(
            f"field {field.name!r} has dtype {array.dtype} where the schema says {field.dtype}:"
            f" convert it with astype({field.dtype.name!r})",
            field=field.name,
        )
    if array.shape != shape:
        raise errors.SchemaError(
            f"field {field.name!r} has shape {array.shape} where {shape} is expected: reshape it, or check the"
            " number of keys",
            field=field.name,
        )
    if array.dtype == field.dtype:
        return array
    # Lists: every item must mean the same number in the field's dtype.
    if array.dtype.kind not in _KINDS:
        raise errors.SchemaError(f"field {field.name!r} holds {array.dtype}, not numbers: convert it", field=field.name)
    with np.errstate(all="ignore"):
        converted = array.astype(field.dtype)
    exact = field.dtype.kind in "fc" or np.array_equal(converted, array)
    if not exact or (field.dtype.kind == "f" and array.dtype.kind == "c"):
        raise errors.SchemaError(
            f"field {field.name!r} holds a value that does not fit {field.dtype}: check it, or widen the schema",
            field=field.name,
        )
    return converted


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
    return any(code in view.format for code in "OPzZ")  # of ctypes: objects, and pointers to anything and to strings


def many_values(values: Any, keys: Keys) -> Any:
    """Return values in the form for the log: a list of buffers, or uint8 [N, nbytes]."""
    if isinstance(values, (bytes, str, dict)) or not isinstance(values, Iterable):
        raise errors.ArgumentError(
            f"values is a single {type(values).__name__}: pass a list of bytes or uint8 [N, nbytes], one for each key;"
            " dicts need a store with a schema",
            name="values",
        )
    if isinstance(values, np.ndarray) and values.ndim == 2 and values.dtype == np.uint8:
        packed: Any = np.ascontiguousarray(values)
        if values.shape[1] > MAX_VALUE:
            one_value(packed[0], keys.row(0) if keys.size else b"")
    else:
        packed = list(values)
    if len(packed) != keys.size:
        raise errors.ArgumentError(f"{len(packed)} values for {keys.size} keys: give one for each", name="values")
    if isinstance(packed, np.ndarray) or all(type(v) is bytes and len(v) <= MAX_VALUE for v in packed):
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
