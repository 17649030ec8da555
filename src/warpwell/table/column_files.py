"""`ColumnWriter`: the ``.npy`` files of one column, written piece by piece with their checksums and statistics."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from .._os import allow_more_files
from ..errors import ArgumentError, DTypeError, FormatError
from ..graph.npy import NpyWriter
from ..kv import crc32c
from .column import validate
from .layout import Layout, layout_of, storage_of
from .library import arrow

CHECKED_BYTES = 1 << 20
"""Bytes of one checksum."""
STATISTICS_ROWS = 8192
"""Rows of one least and one greatest value."""
MOST_CODES = 1 << 16
HAS_NULL, HAS_NAN = 1, 2
"""Flags of the statistics."""
FULL_ADVICE = ". Nothing is left of it. Free some space, or write to another disk."

_BYTE = np.dtype(np.uint8)
_CHUNK = 1 << 20


def statistics_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of a column's statistics."""
    return np.dtype([("least", dtype), ("greatest", dtype), ("flags", np.uint8)])


def stored_type(kind: Any) -> Any:
    """Return the type of a column in a folder: of an extension its storage, of codes their values; 64-bit offsets."""
    pa = arrow()
    kind = storage_of(kind)
    if pa.types.is_dictionary(kind):
        kind = storage_of(kind.value_type)
    if pa.types.is_string(kind) or pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_binary(kind) or pa.types.is_binary_view(kind):
        return pa.large_binary()
    return kind


class _CheckedFile:
    """A ``.npy`` file, and the CRC-32C of each MiB behind its header."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype[Any], inner: tuple[int, ...] = ()) -> None:
        self.name = name
        self.npy = NpyWriter(folder / name, dtype, inner, FULL_ADVICE)
        allow_more_files(self.npy.fileno())
        self._sums: list[int] = []
        self._filled = CHECKED_BYTES

    def append(self, items: NDArray[Any]) -> None:
        """Append rows of the file's dtype."""
        items = np.ascontiguousarray(items, self.npy.dtype)
        self.npy.append(items)
        rest = items.reshape(-1).view(np.uint8)
        while rest.size:
            if self._filled == CHECKED_BYTES:
                self._sums.append(0)
                self._filled = 0
            piece, rest = np.split(rest, [CHECKED_BYTES - self._filled])
            self._sums[-1] = crc32c(piece, self._sums[-1])
            self._filled += piece.size

    def finish(self) -> dict[str, str]:
        """Make the file durable; return its name and checksums."""
        self.npy.close()
        return {"name": self.name, "crc32c": "".join(f"{one:08x}" for one in self._sums)}

    def drop(self) -> None:
        """Close and remove the file."""
        self.npy.__exit__(KeyboardInterrupt)
        self.npy.path.unlink(missing_ok=True)


class _Bits:
    """A file of bits, lowest first."""

    def __init__(self, file: _CheckedFile) -> None:
        self.file = file
        self._rest = np.empty(0, bool)

    def append(self, bits: NDArray[Any]) -> None:
        bits = np.concatenate([self._rest, bits])
        whole = bits.size // 8 * 8
        self.file.append(np.packbits(bits[:whole], bitorder="little"))
        self._rest = bits[whole:]

    def finish(self) -> dict[str, str]:
        self.file.append(np.packbits(self._rest, bitorder="little"))
        return self.file.finish()


class _Statistics:
    """Least and greatest of each `STATISTICS_ROWS` rows; without any number, least is above greatest."""

    def __init__(self, file: _CheckedFile, dtype: np.dtype[Any]) -> None:
        self.file = file
        self._dtype = dtype
        self._float = dtype.kind == "f"
        limits: Any = np.finfo(dtype) if self._float else np.iinfo(dtype)
        self._top = dtype.type(np.inf) if self._float else limits.max
        self._bottom = dtype.type(-np.inf) if self._float else limits.min
        self._values = np.empty(0, dtype)
        self._null = np.empty(0, bool)

    def append(self, values: NDArray[Any], null: NDArray[np.bool_] | None) -> None:
        self._values = np.concatenate([self._values, values])
        self._null = np.concatenate([self._null, np.zeros(len(values), bool) if null is None else null])
        whole = self._values.size // STATISTICS_ROWS * STATISTICS_ROWS
        if whole:
            self._write(
                self._values[:whole].reshape(-1, STATISTICS_ROWS), self._null[:whole].reshape(-1, STATISTICS_ROWS)
            )
            self._values, self._null = self._values[whole:], self._null[whole:]

    def _write(self, values: NDArray[Any], null: NDArray[np.bool_]) -> None:
        nan = np.isnan(values) if self._float else np.zeros_like(null)
        nan &= ~null
        out = np.empty(len(values), statistics_dtype(self._dtype))
        skip = null | nan
        some = bool(skip.any())
        out["least"] = (np.where(skip, self._top, values) if some else values).min(1, initial=self._top)
        out["greatest"] = (np.where(skip, self._bottom, values) if some else values).max(1, initial=self._bottom)
        out["flags"] = HAS_NULL * null.any(1) | HAS_NAN * nan.any(1)
        self.file.append(out)

    def finish(self) -> dict[str, str]:
        if self._values.size:
            self._write(self._values[None], self._null[None])
        return self.file.finish()


class ColumnWriter:
    """Writes one column of one part of a table. Files are created by `begin`, so that `close` is sure to close them.

    Parameters
    ----------
    folder : Path
        Of the part.
    number : int
        Of the column.
    name : str
    kind : pyarrow.DataType
        One that `stored_type` returns.
    codes : {"no", "auto", "must"}
        Whether values are replaced by codes: where that takes fewer bytes, or always.

    Raises
    ------
    DTypeError
        Tables do not have the type, or cannot code it.
    """

    def __init__(self, folder: Path, number: int, name: str, kind: Any, codes: str) -> None:
        self.name = name
        self.type = kind
        self.layout = layout_of(kind, name)
        self.rows = self.nulls = 0
        self._folder = folder
        self._stem = f"{number}-{re.sub(r'[^A-Za-z0-9_]+', '_', name)[:40]}"
        self._open: list[_CheckedFile] = []
        self._must = codes == "must"
        scalar = self.layout.kind == "fixed" and not self.layout.inner
        codable = scalar or self.layout.kind == "text"
        if self._must and not codable:
            raise DTypeError(
                f"column {name!r} of {kind} cannot have codes, which are for numbers, dates, times, "
                "strings and binary: leave it out of codes="
            )
        size = self.layout.dtype.itemsize if scalar and self.layout.dtype is not None else 8
        self._most = MOST_CODES if self._must or size > 2 else 1 << 8
        self._places: dict[Any, int] | None = {} if codable and (self._must or (codes == "auto" and size > 1)) else None
        self._raw = folder / f"{self._stem}.codes.part"
        self._coded: IO[bytes] | None = None

    def begin(self) -> None:
        """Create the files; `close` closes them."""
        self._valid = _Bits(self._file("valid", _BYTE))
        if self._places is None:
            self._begin_values()
        else:
            self._coded = open(self._raw, "w+b")

    def _file(self, what: str, dtype: np.dtype[Any], inner: tuple[int, ...] = ()) -> _CheckedFile:
        file = _CheckedFile(self._folder, f"{self._stem}.{what}.npy", dtype, inner)
        self._open.append(file)
        return file

    def _begin_values(self) -> None:
        """Create the files of values."""
        layout = self.layout
        self._statistics: _Statistics | None = None
        if layout.kind == "null" or layout.dtype is None:
            return
        if layout.kind == "text":
            self._offsets, self._bytes = self._file("offsets", layout.dtype), self._file("bytes", _BYTE)
            self._offsets.append(np.zeros(1, np.int64))
            self._end = 0
            return
        self._values = self._file("values", layout.dtype, () if layout.kind == "bits" else layout.inner)
        self._bits = _Bits(self._values) if layout.kind == "bits" else None
        if layout.kind == "fixed" and not layout.inner:
            self._statistics = _Statistics(self._file("statistics", statistics_dtype(layout.dtype)), layout.dtype)

    def append(self, array: Any) -> None:
        """Append a `pyarrow.Array`; dictionaries, extensions and 32-bit offsets become what is stored.

        Raises
        ------
        FormatError
            The array is damaged.
        ArgumentError
            Codes were asked for, and there are too many values.
        DTypeError
            Lists have null items.
        """
        array = _stored(array, self.type, self.name)
        null = _nulls(array)
        self.rows += len(array)
        self.nulls += 0 if null is None else int(null.sum())
        if self.layout.kind == "null":
            return
        self._valid.append(np.ones(len(array), bool) if null is None else ~null)
        if self._places is not None and not self._append_codes(array, null):
            self._give_codes_up()
        if self._places is None:
            self._append_values(array, null)

    def _append_values(self, array: Any, null: NDArray[np.bool_] | None) -> None:
        if self.layout.kind == "text":
            if null is not None:
                array = arrow().compute.fill_null(array, arrow().scalar(b"", array.type))
            offsets, data = _text(array)
            self._offsets.append(offsets[1:] - offsets[:1] + self._end)
            self._bytes.append(data[offsets[0] : offsets[-1]])
            self._end += int(offsets[-1] - offsets[0])
            return
        self._append_items(_items(array, self.layout, self.name), null)

    def _append_items(self, items: NDArray[Any], null: NDArray[np.bool_] | None) -> None:
        if null is not None:  # else what is behind a null is whatever its maker left there
            items = items.copy()
            items[null] = 0
        if self._bits is not None:
            self._bits.append(items)
        else:
            self._values.append(items)
        if self._statistics is not None:
            self._statistics.append(items, null)

    # -- codes ------------------------------------------------------------------------------------------------

    def _append_codes(self, array: Any, null: NDArray[np.bool_] | None) -> bool:
        """Append codes in the order in which values came; return False if there are too many values."""
        pa = arrow()
        assert self._places is not None and self._coded is not None
        if self.layout.kind == "text":
            encoded = array.cast(pa.large_binary()).dictionary_encode()
        else:
            items = _items(array, self.layout, self.name)
            bits = np.ascontiguousarray(items).view(f"u{items.dtype.itemsize}")  # -0.0 and each NaN are values
            encoded = pa.array(bits, mask=null).dictionary_encode()
        keys = encoded.dictionary.to_pylist()
        places = self._places
        mapped = np.array([places.setdefault(key, len(places)) for key in keys] or [0], np.int32)
        if len(places) > self._most:
            if self._must:
                raise ArgumentError(
                    f"column {self.name!r} has more than {self._most:,} values, too many for codes: leave it out of "
                    "codes=",
                    name="codes",
                )
            return False
        codes = mapped[encoded.indices.fill_null(0).to_numpy(zero_copy_only=False)]
        if null is not None:
            codes[null] = -1
        self._coded.write(codes.astype("<i4").tobytes())
        return True

    def _raw_codes(self) -> Iterator[NDArray[np.int32]]:
        assert self._coded is not None
        self._coded.seek(0)
        while piece := self._coded.read(4 * _CHUNK):
            yield np.frombuffer(piece, "<i4")

    def _end_codes(self) -> None:
        if self._coded is not None:
            self._coded.close()
            self._raw.unlink(missing_ok=True)
            self._coded = None

    def _give_codes_up(self) -> None:
        """Write the values of all codes so far instead."""
        pa = arrow()
        keys = self._keys()
        self._places = None
        self._begin_values()
        for codes in self._raw_codes():
            null = codes < 0
            if self.layout.kind == "text":
                taken = keys.take(pa.array(codes, mask=null)) if len(keys) else pa.nulls(len(codes), keys.type)
                self._append_values(taken, null if null.any() else None)
            else:
                items = keys[codes] if len(keys) else np.zeros(len(codes), self.layout.dtype)
                self._append_items(items, null if null.any() else None)
        self._end_codes()

    def _keys(self) -> Any:
        """Return the values in the order of `_places`: of large_binary, or a NumPy array."""
        assert self._places is not None
        keys = list(self._places)[: self._most]
        if self.layout.kind == "text":
            return arrow().array(keys, arrow().large_binary())
        assert self.layout.dtype is not None
        return np.array(keys, f"u{self.layout.dtype.itemsize}").view(self.layout.dtype)

    def _finish_codes(self) -> dict[str, dict[str, str]]:
        """Sort the values, so that codes compare as they do, and write codes and values."""
        keys = self._keys()
        small = np.dtype(np.uint8 if len(keys) <= 1 << 8 else "<u2")
        if self.layout.kind == "text":
            order = np.array(arrow().compute.sort_indices(keys), np.int64)
            sizes = arrow().compute.binary_length(keys).to_numpy()
            spent, plain = int(sizes.sum()) + 8 * len(keys), 8 * self.rows  # at least: no bytes counted
        else:
            bits = keys.view(f"u{keys.itemsize}")
            nan = np.isnan(keys) if keys.dtype.kind == "f" else np.zeros(len(keys), bool)
            order = np.lexsort((bits, np.where(nan, 0, keys), nan))
            spent, plain = keys.nbytes, keys.itemsize * self.rows
        if not self._must and spent + small.itemsize * self.rows >= plain:
            self._give_codes_up()
            return self._finish_values()
        rank = np.empty(len(keys) + 1, small)
        rank[order] = np.arange(len(keys))
        rank[-1] = 0  # of a null
        codes = self._file("codes", small)
        done: dict[str, NDArray[Any]] = {}
        statistics = _Statistics(self._file("statistics", statistics_dtype(small)), small)
        for raw in self._raw_codes():
            items = rank[raw]
            codes.append(items)
            statistics.append(items, raw < 0)
        self._end_codes()
        if self.layout.kind == "text":
            offsets, data = _text(keys.take(arrow().array(order)))
            done["dictionary_offsets"] = offsets
            done["dictionary_bytes"] = data
        else:
            done["dictionary"] = keys[order]
        written = {"codes": codes.finish(), "statistics": statistics.finish()}
        for what, items in done.items():
            file = self._file(what, items.dtype)
            file.append(items)
            written[what] = file.finish()
        return written

    # -- end --------------------------------------------------------------------------------------------------

    def _finish_values(self) -> dict[str, dict[str, str]]:
        layout = self.layout
        if layout.kind == "null":
            return {}
        if layout.kind == "text":
            return {"offsets": self._offsets.finish(), "bytes": self._bytes.finish()}
        found = {"values": self._values.finish() if self._bits is None else self._bits.finish()}
        if self._statistics is not None:
            found["statistics"] = self._statistics.finish()
        return found

    def finish(self) -> dict[str, Any]:
        """Make the files durable; return the column's description."""
        files = self._finish_values() if self._places is None else self._finish_codes()
        if self.nulls and self.layout.kind != "null":
            files["valid"] = self._valid.finish()
        else:
            self._valid.file.drop()
        return {"nulls": self.nulls, "files": files}

    def close(self) -> None:
        """Close all files, finished or not (idempotent)."""
        self._end_codes()
        for file in self._open:
            file.npy.__exit__(KeyboardInterrupt)


# -- arrays of Arrow as NumPy's ---------------------------------------------------------------------------------


def _stored(array: Any, kind: Any, name: str) -> Any:
    """Return an array as one of the type that is stored, checked where it holds places of other bytes."""
    pa = arrow()
    while isinstance(array, pa.ExtensionArray):
        array = array.storage
    try:
        if pa.types.is_dictionary(array.type):
            validate(array)
            array = array.dictionary_decode()
            return _stored(array, kind, name)
        array.validate(full=layout_of(array.type, name).kind in ("text", "views"))
        return array if array.type == kind else array.cast(kind)
    except pa.ArrowException as error:
        reason = str(error).split("\n")[0][:200]
        raise FormatError(f"column {name!r} is damaged, or not {kind} as told ({reason}): check its source") from None


def _nulls(array: Any) -> NDArray[np.bool_] | None:
    """Return which rows are null; None if none is."""
    if not array.null_count:
        return None
    bits = array.buffers()[0]
    return np.ones(len(array), bool) if bits is None else ~_unpacked(bits, array.offset, len(array))


def _unpacked(bits: Any, first: int, count: int) -> NDArray[np.bool_]:
    raw = np.frombuffer(bits, np.uint8)[first // 8 : (first + count + 7) // 8]
    return np.unpackbits(raw, bitorder="little")[first % 8 :][:count].view(bool)


def _items(array: Any, layout: Layout, name: str) -> NDArray[Any]:
    """Return the items of an array, shape (rows, *inner); those behind nulls are anything."""
    count, inner, dtype = len(array), layout.inner, layout.dtype
    assert dtype is not None
    if layout.kind == "list":
        width = inner[0]
        items = array.values.slice(array.offset * width, count * width)
        null = _nulls(items)
        if null is not None:
            lists = _nulls(array)
            null = null.reshape(count, width)
            if (null if lists is None else null[~lists]).any():
                raise DTypeError(f"column {name!r} has lists with null items: replace these by a number")
        return _items(items, Layout("fixed", dtype), name).reshape(count, width)
    data = array.buffers()[1]
    if data is None or not count:
        return np.zeros((count, *inner), bool if layout.kind == "bits" else dtype)
    if layout.kind == "bits":
        return _unpacked(data, array.offset, count)
    row = int(np.prod(inner, dtype=np.int64))
    flat: NDArray[Any] = np.frombuffer(data, dtype, count * row, array.offset * row * dtype.itemsize)
    return flat.reshape(count, *inner)


def _text(array: Any) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Return offsets and bytes of a large_string or large_binary array."""
    _, offsets, data = array.buffers()
    if offsets is None or not offsets.size:
        return np.zeros(1, np.int64), np.empty(0, np.uint8)
    places = np.frombuffer(offsets, "<i8", len(array) + 1, 8 * array.offset)
    return places, np.empty(0, np.uint8) if data is None or not data.size else np.frombuffer(data, np.uint8)
