"""A store as a ``.npz`` file or a folder (`to_npz`, `to_folder`), and arrays of ``.npz`` files (`NpzSource`)."""

from __future__ import annotations

import contextlib
import itertools
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from ..._npy import npy_header, read_header
from ...array import check_dtype
from ...cache import batches_of
from ...errors import ArgumentError, FormatError
from ...replacing import storage_full
from ..keys import LONGEST_KEY, with_prefix
from ..ragged import Ragged
from ..schema import Schema
from ..store import Store
from .sources import (
    BATCH_BYTES,
    BATCH_RECORDS,
    METADATA,
    Batch,
    Description,
    Source,
    check_value,
    choose,
    require_names,
    rows_of,
)

KEYS, LENGTHS, INTEGERS, VALUES, OFFSETS = "keys", "key_lengths", "key_integers", "values", "value_offsets"
"""Arrays of a dump. `INTEGERS` are flags: which keys are integers. Without a schema, `VALUES` are the bytes of all
values and `OFFSETS` their N + 1 bounds."""
RAGGED = {"_offsets": np.ndarray, "_bytes_offsets": bytes, "_str_offsets": str}
"""Suffixes of the arrays with the N + 1 bounds of a ragged field, by the type of its items."""

_PIECE = 1 << 22
"""Number of bytes that are decompressed at a time."""

Progress = Callable[[str, int, int], None]


def _ignore(stage: str, done: int, total: int) -> None:
    """Show no progress."""


@dataclass(frozen=True)
class DumpReport:
    """The result of a dump.

    Attributes
    ----------
    records : int
        Records.
    nbytes : int
        Size of their values.
    names : str
        How keys are written: "int" (an int64 array, or decimal file names), "bytes" (an array of bytes with
        lengths), "text" or "hex" (file names).
    """

    records: int
    nbytes: int
    names: str


def to_npz(store: Store, path: Path, *, prefix: str = "", progress: Progress = _ignore) -> DumpReport:
    """Write a ``.npz`` file, in bounded memory (not compressed).

    It has the array ``keys``: int64 [N] if every key is an integer; otherwise uint8 [N, width] with ``key_lengths``,
    and with ``key_integers``, bool [N], if some are integers. Keys are in the order of `Store.list`. With a schema each
    field is an array; a ragged one holds all items, and ``NAME_offsets`` (``NAME_str_offsets`` of strings,
    ``NAME_bytes_offsets`` of bytes) their N + 1 bounds. Without a schema, ``values`` holds the bytes of all values and
    ``value_offsets`` their N + 1 bounds. Metadata of the store is the member `METADATA`, in JSON.
    `importers.open_source` reads it back.

    Raises
    ------
    StorageFullError
        No space is left; remove what is at `path`.
    """
    dump = _Dump(store, prefix)
    with storage_full(path), zipfile.ZipFile(path, "w") as archive:
        if store.metadata:
            archive.writestr(METADATA, dump.describe("").to_json())
        names = [[name] for name in dump.arrays]  # the members of an archive are written one after another
        dump.write(lambda name: archive.open(name, "w", force_zip64=True), names, progress)
    return dump.report()


def to_folder(
    store: Store, path: Path, *, prefix: str = "", names: str = "auto", progress: Progress = _ignore
) -> DumpReport:
    """Write a folder: a file for each value, named by its key; with a schema the arrays of `to_npz` as ``.npy`` files.

    The schema, the metadata of the store and the meaning of the names are the file `METADATA`, in JSON.
    `importers.open_source` reads all back.

    Parameters
    ----------
    store : Store
        The store.
    path : pathlib.Path
        The folder; it must not exist.
    prefix : str, optional
        Only keys that begin with it.
    names : {"auto", "text", "int", "hex"}
        How files are named: the key as text (``/`` makes folders), as a decimal number (integers), or in hexadecimal
        (integers as a number with a sign). "auto" chooses numbers if all keys are integers, text if none is and all are
        valid names, otherwise hexadecimal.
    progress : callable, optional
        Called as ``progress("write", done, total)``.

    Raises
    ------
    ArgumentError
        `names` does not fit a key.
    StorageFullError
        No space is left; remove what is at `path`.
    """
    dump = _Dump(store, prefix)
    with storage_full(path):
        path.mkdir()
        if store.schema is None:
            names = dump.write_values(path, names, progress)
            (path / METADATA).write_text(dump.describe(names).to_json())
            return dump.report(names)
        if names != "auto":
            raise ArgumentError("--names is for stores without a schema: a field is a .npy file here", name="names")
        for name in dump.arrays:
            if "/" in name or _as_text(name.encode()) is None:
                raise ArgumentError(f"the field {name!r} cannot be the name of a file: rename it", name="names")
        dump.write(lambda name: (path / name).open("wb"), [[*dump.arrays]], progress)
        (path / METADATA).write_text(dump.describe("").to_json())
    return dump.report()


class _Dump:
    """The records to write, in the order of their keys, and the arrays that hold them.

    Attributes
    ----------
    small_arrays : dict of str to array
        The keys, and the bounds of the items of ragged fields.
    arrays : dict of str to (dtype, shape)
        The fields; `VALUES` if the store has no schema.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        first = prefix.encode(errors="surrogateescape")
        if len(first) > LONGEST_KEY:
            raise ArgumentError(
                f"prefix {prefix!r} has more than {LONGEST_KEY} bytes, the longest that a key can be", name="prefix"
            )
        self._store, self._schema = store, store.schema
        self._keys = keys = with_prefix(store.ordered(), first, None)
        self._sizes = store._records.sizes(keys)
        self._bounds: dict[str, NDArray[np.int64]] = {}
        self.arrays: dict[str, Any] = {}
        self.small_arrays: dict[str, NDArray[Any]]
        if keys.all_integers:
            self.small_arrays = {KEYS: keys.numbers()}
        else:
            padded, lengths = keys.arrays()
            kinds = np.broadcast_to(keys.kinds, keys.size)
            self.small_arrays = {KEYS: padded, LENGTHS: lengths, **({INTEGERS: kinds} if kinds.any() else {})}
        if self._schema is None:
            self._bounds[VALUES] = self.small_arrays[OFFSETS] = np.append(0, np.cumsum(self._sizes))
            self.arrays[VALUES] = np.dtype(np.uint8), (int(self._sizes.sum()),)
        else:
            self._add_fields(self._schema)

    def _add_fields(self, schema: Schema) -> None:
        suffixes = {item_type: suffix for suffix, item_type in RAGGED.items()}
        ragged = {f.name: f.name + suffixes[f.item_type] for f in schema.ragged}
        names = [*(f.name for f in schema.fields), *ragged.values()]
        reserved = {KEYS, LENGTHS, INTEGERS, *([OFFSETS] if VALUES in names else [])}
        wrong = next((n for n in names if n in reserved or names.count(n) > 1), None)
        if wrong is not None:
            raise ArgumentError(f"the array {wrong!r} of a dump has another meaning: rename the field", name="names")
        lengths: dict[str, list[NDArray[np.int64]]] = {name: [np.zeros(1, np.int64)] for name in ragged}
        for rows in self._batches() if ragged else ():
            for name, column in self._read(rows, list(ragged)).items():
                lengths[name].append(column.lengths)
        self._bounds = {name: np.cumsum(np.concatenate(items)) for name, items in lengths.items()}
        self.small_arrays |= {ragged[name]: bounds for name, bounds in self._bounds.items()}
        for f in schema.fields:
            rows_of_array = int(self._bounds[f.name][-1]) if f.is_ragged else self._keys.size
            self.arrays[f.name] = f.dtype, (rows_of_array, *f.shape[f.is_ragged :])

    def describe(self, names: str) -> Description:
        """Return the description of the dump; `names` is the rule by which keys name the files."""
        return Description(names, None if self._schema is None else self._schema.to_json(), self._store.metadata)

    def report(self, names: str | None = None) -> DumpReport:
        """Return the result of this dump; `names` as for `DumpReport`, by default of the array of keys."""
        return DumpReport(self._keys.size, int(self._sizes.sum()), names or ("bytes", "int")[self._keys.all_integers])

    def write(self, open_file: Callable[[str], IO[bytes]], groups: list[list[str]], progress: Progress) -> None:
        """Write all arrays as ``.npy`` files: those of a group are open together, and their records are read once."""
        for name, array in self.small_arrays.items():
            with open_file(f"{name}.npy") as file:
                _write(file, array, npy_header(np.lib.format.dtype_to_descr(array.dtype), array.shape))
        for number, names in enumerate(groups):
            with contextlib.ExitStack() as opened:
                files = {name: opened.enter_context(open_file(f"{name}.npy")) for name in names}
                for name, file in files.items():
                    dtype, shape = self.arrays[name]
                    file.write(npy_header(np.lib.format.dtype_to_descr(dtype), shape))
                for rows in self._batches():
                    for name, array in self._items(rows, names).items():
                        _write(files[name], array)
                    progress("write", number * self._keys.size + rows.stop, len(groups) * self._keys.size)

    def write_values(self, path: Path, names: str, progress: Progress) -> str:
        """Write a file for each value; return how they are named."""
        if names == "auto" and self._keys.size:
            kinds = np.asarray(self._keys.kinds)
            # a number and a name of the same digits would be one file
            names = "int" if kinds.all() else "hex" if kinds.any() else _NAMES_ONLY
        names, files = _file_names(self._keys.to_list(), names)
        folders = {path}
        for rows in self._batches():
            for name, value in zip(files[rows], self._read(rows), strict=True):
                target = path / name
                if target.parent not in folders:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    folders.add(target.parent)
                target.write_bytes(value)
            progress("write", rows.stop, self._keys.size)
        return names

    def _batches(self) -> Iterator[slice]:
        """Yield positions of keys whose values fit into memory."""
        return iter(batches_of(self._sizes, BATCH_BYTES, BATCH_RECORDS))

    def _items(self, rows: slice, names: list[str]) -> dict[str, NDArray[Any]]:
        """Return the arrays of some records; of ragged fields, all items."""
        batch = self._read(rows, None if self._schema is None else names)
        if self._schema is None:
            batch = {VALUES: Ragged(np.frombuffer(b"".join(batch), np.uint8), np.cumsum([0, *map(len, batch)]))}
        for name in self._bounds.keys() & batch:
            if not np.array_equal(batch[name].lengths, np.diff(self._bounds[name][rows.start : rows.stop + 1])):
                raise self._changed()
            batch[name] = batch[name].values
        arrays: dict[str, NDArray[Any]] = batch
        return arrays

    def _read(self, rows: slice, fields: list[str] | None = None) -> Any:
        """Return the values of some records: a list of bytes, or a dict of some fields."""
        values, found = self._store.get_many(self._keys.take(rows), fields=fields)
        if not found.all():
            raise self._changed()
        return values

    def _changed(self) -> ArgumentError:
        return ArgumentError(
            f'{self._store.path} was changed during the dump: dump it again, or through a store open with mode "r"'
        )


def _write(file: IO[bytes], array: NDArray[Any], header: bytes = b"") -> None:
    file.write(header)
    if array.size:  # memoryviews of empty arrays cannot be cast
        file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _file_names(keys: list[int | bytes], rule: str) -> tuple[str, list[str]]:
    """Return how keys are named, and the names."""
    for choice in _NAMES if rule == "auto" else ("text", "hex") if rule == _NAMES_ONLY else (rule,):
        names = [_NAMES[choice](key) for key in keys]
        wrong = next((key for key, name in zip(keys, names, strict=True) if name is None), None)
        if wrong is None:
            good = [name for name in names if name is not None]
            wrong = _parent_of_another(keys, good)
            if wrong is None:
                return choice, good
    instead = "use --names hex" if rule in ("text", "int") else "dump to a .npz file"
    raise ArgumentError(f"key {wrong!r:.60} cannot be the name of a file as {rule}: {instead}", name="names")


def _parent_of_another(keys: list[int | bytes], names: list[str]) -> int | bytes | None:
    """Return a key whose name would be both a file and a folder ("a" and "a/b"), or None."""
    folders = {str(parent) for name in names if "/" in name for parent in PurePosixPath(name).parents}
    return next((key for key, name in zip(keys, names, strict=True) if name in folders), None)


def _as_text(key: int | bytes) -> str | None:
    try:
        text = key.decode() if isinstance(key, bytes) else ""
    except UnicodeDecodeError:
        return None
    parts = text.split("/")
    is_allowed = text.isprintable() and parts[0] != METADATA and not any(part in ("", ".", "..") for part in parts)
    return text if is_allowed and max(len(part.encode()) for part in parts) <= _MAX_NAME else None


_MAX_NAME = 255
"""Bytes of the name of a file on Linux."""
_NAMES_ONLY = "text or hex"
_NAMES: dict[str, Callable[[int | bytes], str | None]] = {
    "text": _as_text,
    "int": lambda key: str(key) if isinstance(key, int) else None,
    "hex": lambda key: f"{key:+}" if isinstance(key, int) else key.hex() if 2 * len(key) <= _MAX_NAME else None,
}


class NpzSource(Source):
    """Rows of arrays that have the same length; or a dump that ``warpwell kv dump`` wrote.

    Parameters
    ----------
    path : pathlib.Path
        The file, or the folder of a dump with a schema; arrays are read row by row, compressed ones too.
    rule : str, optional
        One of `KEY_RULES`; names are the items of `key_field`.
    key_field : str, optional
        The array of keys; ``keys`` if there is one, else rows are numbered.
    fields : list of str, optional
        Arrays to take; all by default.

    Raises
    ------
    FormatError
        The file is damaged, holds Python objects or Fortran order, or its arrays differ in length.
    """

    kind = "npz"

    def __init__(self, path: Path, rule: str | None, key_field: str | None, fields: list[str] | None) -> None:
        super().__init__(path, rule or "name")
        self.path = path
        self._zip: zipfile.ZipFile | ArrayFolder
        try:
            self._zip = ArrayFolder(path) if path.is_dir() else zipfile.ZipFile(path)
        except (zipfile.BadZipFile, NotImplementedError) as error:
            raise FormatError(f"{path} is not a .npz file ({error}): write it with numpy.savez", path=path) from None
        self._arrays: dict[str, NpzMember] = {}
        self._ends: dict[str, NDArray[Any]] = {}
        try:
            order: list[str] = []
            if METADATA in self._zip.namelist():
                described = Description.from_json(self._zip.read(METADATA), self.where)
                self.metadata, order = described.metadata, [name for name, *_ in described.schema or ()]
            self._open_arrays(key_field, fields, order)
            require_names(rule, self._key, self.where)
        except BaseException:
            self.close()
            raise

    def _open_arrays(self, key_field: str | None, fields: list[str] | None, order: list[str]) -> None:
        """Open the arrays to load; those that `order` names are the first fields."""
        found = [n[:-4] for n in self._zip.namelist() if n.endswith(".npy")]
        names = [*(n for n in order if n in found), *(n for n in found if n not in order)]
        if not names:
            raise FormatError(
                f"{self.path} is a zip file without arrays: unpack it, and load the folder", path=self.path
            )
        if key_field is not None:
            choose([key_field], names, self.where)
        self._key = key_field or (KEYS if KEYS in names else None)
        if self._key is None:
            self.rule = "number"
        self._bytes = VALUES in names and OFFSETS in names and fields is None
        special = {self._key, *({LENGTHS, INTEGERS} & set(names) if self._key == KEYS and LENGTHS in names else ())}
        chosen = [VALUES] if self._bytes else [n for n in choose(fields, names, self.where) if n not in special]
        self._ragged: dict[str, tuple[str, type]] = {VALUES: (OFFSETS, bytes)} if self._bytes else {}
        if self._key == KEYS and not self._bytes:
            self._ragged = self._find_ragged(chosen, names)
        bounds = [name for name, _ in self._ragged.values()]
        self._fields = [name for name in chosen if name not in bounds]
        if not self._fields:
            raise FormatError(f"{self.path} has no array but the keys: add an array of values", path=self.path)
        for name in [*self._fields, *(n for n in special if n), *bounds]:
            array = self._arrays[name] = NpzMember(self._zip, name, self.path)
            check_dtype(array.dtype, array.where)
        self.records = self._rows()
        self.schema = None if self._bytes else {name: self._spec(name) for name in self._fields}

    def _spec(self, name: str) -> Any:
        """Return the field of a schema for an array."""
        array, (_, item_type) = self._arrays[name], self._ragged.get(name, ("", np.ndarray))
        if array.dtype.kind == "U" and len(array.shape) == 1:
            item_type = str
        if item_type is not np.ndarray:
            return item_type.__name__, ()
        return array.dtype, ((None,) if name in self._ragged else ()) + array.shape[1:]

    def close(self) -> None:
        """Close the file."""
        for member in self._arrays.values():
            member.close()
        self._zip.close()

    def batches(self, first: int = 0) -> Iterator[Batch]:
        """Read all rows from number `first` on."""
        skipped = min(first, self.records)
        for name, member in self._arrays.items():
            member.skip(0 if name in self._ragged else skipped)
        for name, (bounds_name, _) in self._ragged.items():
            self._ends[name] = self._arrays[bounds_name].read(1)
            if skipped:
                self._arrays[name].skip(min(max(0, int(self._ends[name][0])), self._arrays[name].shape[0]))
        fixed = sum(self._arrays[n].row_bytes for n in self._fields if n not in self._ragged)
        ragged = sum(self._arrays[n].row_bytes * self._arrays[n].shape[0] for n in self._ragged)
        step = rows_of(fixed + ragged // max(1, self.records))
        for start in range(first, self.records, step):
            count = min(step, self.records - start)
            bounds = {name: self._bounds(name, count) for name in self._ragged}
            sizes = np.full(count, fixed, np.int64)
            for name, ends in bounds.items():
                sizes += np.diff(ends) * self._arrays[name].row_bytes
            check_value(int(sizes.max()), f"{self.path}: record {start + int(sizes.argmax())}")
            keys = self._keys(start, count)
            for rows in batches_of(sizes, 1 << 24, count):  # one large value makes a batch of many small ones too large
                values: dict[str, Any] = {}
                for name in self._fields:
                    if name in bounds:
                        offsets = bounds[name][rows.start : rows.stop + 1]
                        items = self._arrays[name].read(int(offsets[-1] - offsets[0]))
                        values[name] = Ragged(items, offsets - offsets[0], self._ragged[name][1])
                    else:
                        values[name] = self._arrays[name].read(rows.stop - rows.start)
                share = (start + rows.stop) / self.records
                yield Batch(keys[rows], values[VALUES] if self._bytes else values, int(sizes[rows].sum()), share)
        for name in () if self.records else self._ragged:
            self._bounds(name, 0)  # there is one bound of no items
        for member in self._arrays.values():
            member.finish()  # the zip file's checksum of an array is compared at its end

    def _find_ragged(self, chosen: list[str], names: list[str]) -> dict[str, tuple[str, type]]:
        """Return the ragged fields of a dump: for each the name of its bounds, and the type of its items."""
        found = {}
        (count, *_), _ = self._read_header(KEYS)
        for name, (suffix, item_type) in itertools.product(chosen, RAGGED.items()):
            if name + suffix in names:
                shape, dtype = self._read_header(name + suffix)
                if dtype == np.int64 and shape == (count + 1,):
                    found[name] = name + suffix, item_type
        return found

    def _read_header(self, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        with contextlib.closing(NpzMember(self._zip, name, self.path)) as member:
            return member.shape or (0,), member.dtype

    def _bounds(self, name: str, count: int) -> NDArray[Any]:
        """Return the bounds of the next items of a ragged field, count + 1 offsets."""
        offsets = self._ragged[name][0]
        bounds = np.concatenate([self._ends[name], self._arrays[offsets].read(count)])
        if (np.diff(bounds) < 0).any() or bounds[0] < 0 or int(bounds[-1]) > self._arrays[name].shape[0]:
            raise FormatError(
                f"{self.path}: {offsets} does not rise to the end of {name}: was the file edited?", path=self.path
            )
        self._ends[name] = bounds[-1:]
        return bounds

    def _keys(self, start: int, count: int) -> NDArray[np.int64] | list[Any]:
        if self._key is None:
            return np.arange(start, start + count)
        column = self._arrays[self._key].read(count)
        where = f"{self.path}: {self._key}"
        if LENGTHS in self._arrays:
            if column.ndim != 2 or column.dtype != np.uint8:
                raise FormatError(f"{where} is not uint8 [N, width] though there are {LENGTHS}", path=self.path)
            lengths = self._arrays[LENGTHS].read(count).tolist()
            names: list[Any] = [row.tobytes()[:n] for row, n in zip(column, lengths, strict=True)]
            keys: NDArray[np.int64] | list[Any] = self.keys_from_names(names, start, where)
            if INTEGERS in self._arrays and keys is names:
                for k in np.flatnonzero(self._arrays[INTEGERS].read(count)).tolist():
                    keys[k] = int.from_bytes(names[k], "little", signed=True)
            return keys
        return self.keys_from_column(column, start, where)

    def _rows(self) -> int:
        shapes = {n: m.shape for n, m in self._arrays.items()}
        flat = [n for n, shape in shapes.items() if not shape]
        if flat:
            raise FormatError(f"{self.path}: {flat[0]} is a single number: it has no rows", path=self.path)
        bounds = [name for name, _ in self._ragged.values()]
        lengths = {n: shape[0] - (n in bounds) for n, shape in shapes.items() if n not in self._ragged}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{n} has {length}" for n, length in lengths.items())
            raise FormatError(
                f"{self.path}: the arrays have several lengths ({listed}): choose with --fields", path=self.path
            )
        if min(lengths.values()) < 0 or (self._bytes and self._arrays[OFFSETS].dtype != np.int64):
            raise FormatError(f"{self.path}: {OFFSETS} is not int64 [N + 1]", path=self.path)
        return next(iter(lengths.values()))


class ArrayFolder:
    """A folder of ``.npy`` files, with the methods of `zipfile.ZipFile` that `NpzSource` calls."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def namelist(self) -> list[str]:
        """Return the names of the files."""
        return sorted(file.name for file in self._path.iterdir())

    def open(self, name: str) -> IO[bytes]:
        """Open a file."""
        return (self._path / name).open("rb")

    def read(self, name: str) -> bytes:
        """Return the contents of a file."""
        return (self._path / name).read_bytes()

    def close(self) -> None:
        """Do nothing: files are closed one by one."""


class NpzMember:
    """One array of a ``.npz`` file, compressed or not, or of a folder, read from its start on.

    Parameters
    ----------
    archive : zipfile.ZipFile or ArrayFolder
    name : str
        The array.
    path : Path
        The file, for messages.

    Attributes
    ----------
    shape : tuple of int
    dtype : numpy.dtype
        Unchecked: the caller checks it.
    row_bytes : int
        Bytes of an item of the first dimension; of the array if it has no dimensions.

    Raises
    ------
    FormatError
        Not an array, Fortran order, or damaged; also while reading.
    """

    def __init__(self, archive: zipfile.ZipFile | ArrayFolder, name: str, path: Path) -> None:
        self.where = f"{path}: {name}"
        self._path = path
        try:
            self._file: IO[bytes] = archive.open(f"{name}.npy")
            self.shape, self.dtype = read_header(self._file, self.where, "write the file with numpy.savez")
        except (EOFError, zipfile.BadZipFile, zlib.error, KeyError, RuntimeError, NotImplementedError) as error:
            raise FormatError(
                f"{self.where} is not a readable array ({error}): write the file with numpy.savez", path=path
            ) from None
        self.row_bytes = self.dtype.itemsize * int(np.prod(self.shape[1:], dtype=np.int64))

    def read(self, count: int) -> NDArray[Any]:
        """Return the next `count` rows."""
        buffer = bytearray(count * self.row_bytes)
        view, done = memoryview(buffer), 0
        while done < len(buffer):
            got = self._read(min(len(buffer) - done, _PIECE))
            if not got:
                raise FormatError(f"{self.where} ends too early: is the file truncated?", path=self._path)
            view[done : done + len(got)] = got
            done += len(got)
        return np.frombuffer(buffer, self.dtype).reshape(count, *self.shape[1:])

    def skip(self, count: int) -> None:
        """Read `count` rows and drop them: a compressed array has no other way to the rows after them."""
        rows = max(1, _PIECE // max(1, self.row_bytes))
        for start in range(0, count, rows):
            self.read(min(rows, count - start))

    def finish(self) -> None:
        """Check that nothing is left. A zip file's checksum is compared at the end."""
        if self._read(1):
            raise FormatError(f"{self.where} is longer than its header says", path=self._path)

    def close(self) -> None:
        """Close the array; the archive stays open."""
        self._file.close()

    def _read(self, nbytes: int) -> bytes:
        try:
            return self._file.read(nbytes)
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise FormatError(f"{self.where} is damaged ({error}): get the file again", path=self._path) from None
