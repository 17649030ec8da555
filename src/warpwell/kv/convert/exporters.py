"""Export the records of a store: ``to_npz`` and ``to_folder``."""

from __future__ import annotations

import contextlib
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from ..._npy import npy_header
from ...cache import batches_of
from ...errors import ArgumentError
from ...replacing import storage_full
from ..keys import INT_KEY, LONGEST_KEY, Keys, with_prefix
from ..ragged import Ragged
from ..store import Store
from .import_npz import INTEGERS, KEYS, LENGTHS, OFFSETS, RAGGED, VALUES
from .sources import BATCH_BYTES, BATCH_RECORDS

Progress = Callable[[str, int, int], None]


def _ignore(stage: str, done: int, total: int) -> None:
    """Show no progress."""


@dataclass(frozen=True)
class Dumped:
    """The result of an export.

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


def to_npz(store: Store, path: Path, *, prefix: str = "", progress: Progress = _ignore) -> Dumped:
    """Write a ``.npz`` file, in bounded memory (not compressed).

    It has the array ``keys``: int64 [N] if every key is an integer; otherwise uint8 [N, width] with ``key_lengths``,
    and with ``key_integers``, bool [N], if some are integers. Keys are in the order of `Store.list`. With a schema each
    field is an array; a ragged one holds all items, and ``NAME_offsets`` (``NAME_str_offsets`` of strings,
    ``NAME_bytes_offsets`` of bytes) their N + 1 bounds. Without a schema, ``values`` holds the bytes of all values and
    ``value_offsets`` their N + 1 bounds.
    `importers.open_source` reads it back.

    Raises
    ------
    StorageFullError
        No space is left; remove what is at `path`.
    """
    entries = _Entries(store, prefix)
    fields, count = _Fields(store, entries), entries.keys.size
    with storage_full(path), zipfile.ZipFile(path, "w") as archive:
        for name, array in fields.small_arrays.items():
            with _member(archive, name, array.dtype, array.shape) as file:
                _write(file, array)
        for n, (name, (dtype, shape)) in enumerate(fields.arrays.items()):
            with _member(archive, name, dtype, shape) as file:
                for done, batch in fields.batches([name]):
                    _write(file, batch[name])
                    progress("write", n * count + done, len(fields.arrays) * count)
    return Dumped(count, entries.nbytes, entries.key_kind)


def to_folder(
    store: Store, path: Path, *, prefix: str = "", names: str = "auto", progress: Progress = _ignore
) -> Dumped:
    """Write a folder: a file for each value, named by its key; with a schema the arrays of `to_npz` as ``.npy`` files.

    Parameters
    ----------
    store : Store
        The store.
    path : pathlib.Path
        The folder; it must not exist.
    prefix : str, optional
        Only keys that begin with it.
    names : {"auto", "text", "int", "hex"}
        How files are named: the key as text (``/`` makes folders), as a decimal number (8-byte keys), or in
        hexadecimal. "auto" chooses numbers if all keys are integers, text if none is and all are valid names, otherwise
        hexadecimal.
    progress : callable, optional
        Called as ``progress("write", done, total)``.

    Raises
    ------
    ArgumentError
        `names` does not fit a key.
    StorageFullError
        No space is left; remove what is at `path`.
    """
    entries = _Entries(store, prefix)
    with storage_full(path):
        path.mkdir()
        if store.schema is not None:
            return _fields_to_folder(store, path, entries, names, progress)
        if names == "auto" and entries.kinds and entries.keys.size:
            kinds = np.asarray(entries.keys.kinds)
            # a number and a name of the same digits would be one file
            names = "int" if kinds.all() else "hex" if kinds.any() else _NAMES_ONLY
        rule, files = _file_names([entries.keys.raw(k) for k in range(entries.keys.size)], names)
        made = {path}
        start = 0
        for done, keys_of_batch in entries.batches():
            for name, value in zip(files[start:done], _read(store, keys_of_batch), strict=True):
                target = path / name
                if target.parent not in made:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    made.add(target.parent)
                target.write_bytes(value)
            start = done
            progress("write", done, entries.keys.size)
    return Dumped(entries.keys.size, entries.nbytes, rule)


def _fields_to_folder(store: Store, path: Path, entries: _Entries, names: str, progress: Progress) -> Dumped:
    if names != "auto":
        raise ArgumentError("--names is for stores without a schema: a field is a .npy file here", name="names")
    fields = _Fields(store, entries)
    for name in fields.arrays:
        if "/" in name or _as_text(name.encode()) is None:
            raise ArgumentError(f"the field {name!r} cannot be the name of a file: rename it", name="names")
    for name, array in fields.small_arrays.items():
        np.save(path / f"{name}.npy", array)
    with contextlib.ExitStack() as opened:
        files: dict[str, IO[bytes]] = {}
        for name, (dtype, shape) in fields.arrays.items():
            files[name] = opened.enter_context((path / f"{name}.npy").open("wb"))
            _header(files[name], dtype, shape)
        for done, batch in fields.batches(list(files)):
            for name, array in batch.items():
                _write(files[name], array)
            progress("write", done, entries.keys.size)
    return Dumped(entries.keys.size, entries.nbytes, entries.key_kind)


class _Fields:
    """The arrays of a dump.

    Attributes
    ----------
    small_arrays : dict of str to array
        The keys, and the bounds of the items of ragged fields.
    arrays : dict of str to (dtype, shape)
        The fields; `VALUES` if the store has no schema.
    """

    def __init__(self, store: Store, entries: _Entries) -> None:
        self._store, self._entries, self._schema = store, entries, store.schema
        self.small_arrays = entries.key_arrays
        if self._schema is None:
            offsets = np.concatenate([[0], np.cumsum(entries.sizes)])
            self._bounds = {VALUES: offsets}
            self.small_arrays[OFFSETS] = offsets
            self.arrays: dict[str, Any] = {VALUES: (np.dtype(np.uint8), (int(offsets[-1]),))}
            return
        suffixes = {item_type: suffix for suffix, item_type in RAGGED.items()}
        ragged = {f.name: f.name + suffixes[f.item_type] for f in self._schema.ragged}
        names = [*(f.name for f in self._schema.fields), *ragged.values()]
        reserved = {KEYS, LENGTHS, INTEGERS, *([OFFSETS] if VALUES in names else [])}
        wrong = next((n for n in names if n in reserved or names.count(n) > 1), None)
        if wrong is not None:
            raise ArgumentError(f"the array {wrong!r} of a dump has another meaning: rename the field", name="names")
        lengths: dict[str, list[NDArray[np.int64]]] = {name: [np.zeros(1, np.int64)] for name in ragged}
        for _, keys_of_batch in entries.batches() if ragged else ():
            for name, column in _read(store, keys_of_batch, list(ragged)).items():
                lengths[name].append(column.lengths)
        self._bounds = {name: np.cumsum(np.concatenate(items)) for name, items in lengths.items()}
        self.small_arrays |= {ragged[name]: bounds for name, bounds in self._bounds.items()}
        self.arrays = {}
        for f in self._schema.fields:
            rows = int(self._bounds[f.name][-1]) if f.is_ragged else entries.keys.size
            self.arrays[f.name] = f.dtype, (rows, *(f.shape[1:] if f.is_ragged else f.shape))

    def batches(self, names: list[str]) -> Iterator[tuple[int, dict[str, NDArray[Any]]]]:
        """Yield the number of keys so far, and arrays of the next records; of ragged fields, all items."""
        start = 0
        for done, keys_of_batch in self._entries.batches():
            batch = _read(self._store, keys_of_batch, None if self._schema is None else names)
            if self._schema is None:
                batch = {VALUES: Ragged(np.frombuffer(b"".join(batch), np.uint8), np.cumsum([0, *map(len, batch)]))}
            for name in self._bounds.keys() & batch:
                if not np.array_equal(batch[name].lengths, np.diff(self._bounds[name][start : done + 1])):
                    raise _changed(self._store)
                batch[name] = batch[name].values
            yield done, batch
            start = done


class _Entries:
    """The keys to write, in order, and the sizes of their values: int64 keys as numbers, others as bytes."""

    def __init__(self, store: Store, prefix: str) -> None:
        first = prefix.encode(errors="surrogateescape")
        if len(first) > LONGEST_KEY:
            raise ArgumentError(
                f"prefix {prefix!r} has more than {LONGEST_KEY} bytes, the longest that a key can be", name="prefix"
            )
        self.kinds = store._records.kinds
        self.keys = with_prefix(store.ordered(), first, None)
        self.sizes = store._records.sizes(self.keys)
        self.nbytes = int(self.sizes.sum())

    @property
    def key_arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays that hold the keys."""
        if self.keys.all_integers:
            return {KEYS: self.keys.numbers()}
        padded, lengths = self.keys.arrays()
        arrays: dict[str, NDArray[Any]] = {KEYS: padded, LENGTHS: lengths}
        kinds = np.broadcast_to(self.keys.kinds, self.keys.size)
        return {**arrays, INTEGERS: kinds} if kinds.any() else arrays

    @property
    def key_kind(self) -> str:
        """Return how those arrays store the keys."""
        return "int" if self.keys.all_integers else "bytes"

    def batches(self) -> Iterator[tuple[int, Keys]]:
        """Yield batches of keys whose values fit into memory, and the number of keys so far."""
        for rows in batches_of(self.sizes, BATCH_BYTES, BATCH_RECORDS):
            yield rows.stop, self.keys.take(rows)


def _read(store: Store, keys: Keys, fields: list[str] | None = None) -> Any:
    """Return the values of keys: a list of bytes, or a dict of some fields."""
    values, found = store.get_many(keys, fields=fields)
    if not found.all():
        raise _changed(store)
    return values


def _changed(store: Store) -> ArgumentError:
    return ArgumentError(
        f'{store.path} was changed during the dump: dump it again, or through a store open with mode "r"'
    )


@contextlib.contextmanager
def _member(archive: zipfile.ZipFile, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Iterator[IO[bytes]]:
    with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
        _header(file, dtype, shape)
        yield file


def _write(file: IO[bytes], array: NDArray[Any]) -> None:
    if array.size:  # memoryviews of empty arrays cannot be cast
        file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _header(file: IO[bytes], dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    file.write(npy_header(np.lib.format.dtype_to_descr(dtype), shape))


def _file_names(keys: list[bytes], rule: str) -> tuple[str, list[str]]:
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


def _parent_of_another(keys: list[bytes], names: list[str]) -> bytes | None:
    """Return a key whose name would be both a file and a folder ("a" and "a/b"), or None."""
    folders = {str(parent) for name in names if "/" in name for parent in PurePosixPath(name).parents}
    return next((key for key, name in zip(keys, names, strict=True) if name in folders), None)


def _as_text(key: bytes) -> str | None:
    try:
        text = key.decode()
    except UnicodeDecodeError:
        return None
    parts = text.split("/")
    is_allowed = text.isprintable() and not any(part in ("", ".", "..") for part in parts)
    return text if is_allowed and max(len(part.encode()) for part in parts) <= _MAX_NAME else None


_MAX_NAME = 255
"""Bytes of the name of a file on Linux."""
_NAMES_ONLY = "text or hex"
_NAMES: dict[str, Callable[[bytes], str | None]] = {
    "text": _as_text,
    "int": lambda key: str(int.from_bytes(key, "little", signed=True)) if len(key) == INT_KEY else None,
    "hex": lambda key: key.hex() if 2 * len(key) <= _MAX_NAME else None,
}
