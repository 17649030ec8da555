"""Records out of other formats into a store: ``open_source`` and ``load``."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ...errors import ArgumentError, FormatError, KeyLengthError, MissingFileError, ValueSizeError
from ...errors.general import extra
from ..keys import MAX_KEY
from ..schema import MAX_VALUE

#: What a record's key is: its name in the source, its number there (8 bytes), or BLAKE2b of its name (16 bytes).
KEY_RULES = ("name", "number", "hash")

BATCH_BYTES = 8 << 20
BATCH_RECORDS = 4096
_COMMIT_BYTES = 64 << 20
_COMMIT_RECORDS = 1 << 18

SchemaFields = dict[str, tuple[str, tuple[int, ...]]]
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Batch:
    """Records, as `Store.put_many` takes them.

    Attributes
    ----------
    keys : int64 [N], or list of bytes (and int)
        The keys.
    values : list of bytes, or dict of arrays [N, ...]
        The values; arrays where the source has a schema.
    nbytes : int
        Size of the values.
    """

    keys: NDArray[np.int64] | list[Any]
    values: list[bytes] | dict[str, NDArray[Any]]
    nbytes: int


class Source(Protocol):
    """Where records come from."""

    @property
    def kind(self) -> str:
        """What it is, for people: "folder", "npz", "lmdb", "datasets"."""

    @property
    def schema(self) -> SchemaFields | None:
        """Fields of every record; None where values are bytes."""

    @property
    def records(self) -> int:
        """How many records there are; 0 where only the end tells."""

    def batches(self) -> Iterator[Batch]:
        """Read all records, in bounded memory."""

    def close(self) -> None:
        """Let go of the source; may be called again."""


class Target(Protocol):
    """What `load` needs of a store."""

    def put_many(self, keys: Any, values: Any) -> Any:
        """Write records."""

    def commit(self) -> Any:
        """Make them durable."""


@dataclass(frozen=True)
class Loaded:
    """What `load` did.

    Attributes
    ----------
    records : int
        Records that were read and put; a key that came twice counts twice, and its later value stays.
    nbytes : int
        Size of their values.
    """

    records: int
    nbytes: int


def open_source(
    path: str | Path,
    *,
    keys: str | None = None,
    key_field: str | None = None,
    fields: list[str] | None = None,
    database: str | None = None,
) -> Source:
    """Open records in another format; the content tells which.

    Parameters
    ----------
    path : path-like
        A folder of files (each file a value), a ``.npz`` file (each row a record), an LMDB environment (folder or
        file), or a data set that Hugging Face's ``datasets`` saved with ``save_to_disk`` or as ``.arrow``.
    keys : {"name", "number", "hash"}, optional
        What the keys are. A name is a file's path in the folder, an LMDB key, or what `key_field` holds; it is the
        default where there are names. A number counts from 0 in the order of the source.
    key_field : str, optional
        Array or column whose items are the keys. A ``.npz`` file has its array ``keys`` for it, if there is one.
    fields : list of str, optional
        Arrays or columns to take; all by default.
    database : str, optional
        Named database of an LMDB environment.

    Returns
    -------
    Source
        Opened; only its head has been read.

    Raises
    ------
    MissingFileError
        No such file or folder.
    FormatError
        Of no known format, or damaged.
    ArgumentError
        An option that the format does not have, or a package is missing.
    """
    path = Path(path)
    if keys is not None and keys not in KEY_RULES:
        raise ArgumentError(f"keys {keys!r} cannot be: choose one of {', '.join(KEY_RULES)}", name="keys")
    if not path.exists():
        raise MissingFileError(f"{path} does not exist: give a folder, a .npz file or an LMDB environment", path=path)
    kind = _kind(path)
    _only("key_field", key_field, kind, ("npz", "datasets"))
    _only("fields", fields, kind, ("npz", "datasets"))
    _only("database", database, kind, ("lmdb",))
    if kind == "npz":
        from .import_npz import NpzSource

        return NpzSource(path, KeyRule(keys), key_field, fields)
    if kind == "lmdb":
        from .import_lmdb import LmdbSource

        return LmdbSource(path, KeyRule(keys), database)
    if kind == "datasets":
        from .import_datasets import DatasetSource

        return DatasetSource.open(path, KeyRule(keys), key_field, fields)
    from .import_folder import FolderSource

    return FolderSource(path, KeyRule(keys))


def load(source: Source, store: Target, progress: Progress | None = None) -> Loaded:
    """Put all records of a source into a store, in bounded memory; commit now and then and at the end.

    A load that is broken off leaves a store with the records up to some batch.

    Parameters
    ----------
    source : Source
        Where from.
    store : Store
        Where to; its schema is the source's.
    progress : callable, optional
        Called after each batch as ``progress("load", records, total)``; total is 0 where it is not known.
    """
    records = nbytes = 0
    committed = (0, 0)
    for batch in source.batches():
        store.put_many(batch.keys, batch.values)
        records += len(batch.keys)
        nbytes += batch.nbytes
        if records - committed[0] >= _COMMIT_RECORDS or nbytes - committed[1] >= _COMMIT_BYTES:
            store.commit()
            committed = (records, nbytes)
        if progress is not None:
            progress("load", records, source.records)
    store.commit()
    return Loaded(records, nbytes)


class KeyRule:
    """Makes keys from names.

    Parameters
    ----------
    rule : {"name", "number", "hash"} or None
        What the user asked for.
    """

    def __init__(self, rule: str | None) -> None:
        self.rule = rule

    def from_names(self, names: list[bytes], start: int, where: str) -> NDArray[np.int64] | list[bytes]:
        """Return a key for each name; `start` is the number of the first.

        Raises
        ------
        KeyLengthError
            A name is empty or has more than 16 bytes; says what to do.
        """
        if self.rule == "number":
            return self.from_numbers(start, len(names))
        if self.rule == "hash":
            return [hashlib.blake2b(name, digest_size=MAX_KEY).digest() for name in names]
        for k, name in enumerate(names):
            if not 1 <= len(name) <= MAX_KEY:
                raise KeyLengthError(
                    f"{where}: record {start + k} is named {name[:40]!r}, which has {len(name)} bytes where a key has "
                    f"1 to {MAX_KEY}: take --keys hash (16 bytes of BLAKE2b of the name) or --keys number",
                    name="key",
                    length=len(name),
                )
        return names

    def from_numbers(self, start: int, count: int) -> NDArray[np.int64]:
        """Return `count` numbers from `start` as keys."""
        return np.arange(start, start + count, dtype=np.int64)

    def from_column(self, column: NDArray[Any], start: int, where: str) -> NDArray[np.int64] | list[bytes]:
        """Return keys from an array of integers, ``S`` or ``U`` strings, or uint8 [N, 1 to 16].

        Raises
        ------
        FormatError
            An array of something else.
        """
        if self.rule == "number":
            return self.from_numbers(start, len(column))
        if column.dtype.kind in "iu" and column.ndim == 1:
            if column.dtype == np.uint64 and column.size and column.max() >> np.uint64(63):
                raise FormatError(f"{where} holds {column.max()}, over 63 bits: save it as int64", path=where)
            numbers = column.astype("<i8")
            if self.rule != "hash":
                return numbers
            return self.from_names([n.tobytes() for n in numbers], start, where)
        if column.dtype == np.uint8 and column.ndim == 2:
            names = [row.tobytes() for row in column]
        elif column.dtype.kind in "SU" and column.ndim == 1:
            names = [n if isinstance(n, bytes) else n.encode() for n in column.tolist()]
            if any(b"\0" in n for n in names):
                raise FormatError(
                    f"{where} is {column.dtype} and holds zeros, which at a name's end cannot be told from padding:"
                    " save uint8 [N, 1 to 16]",
                    path=where,
                )
        else:
            raise FormatError(
                f"{where} is {column.dtype} of shape {column.shape}: take integers [N], strings [N] or uint8 [N, 16]",
                path=where,
            )
        return self.from_names(names, start, where)


def check_value(nbytes: int, where: str) -> None:
    """Refuse a value over the limit; `where` names it."""
    if nbytes > MAX_VALUE:
        raise ValueSizeError(
            f"{where} has {nbytes} bytes where a value has at most {MAX_VALUE}: split it", name="value", nbytes=nbytes
        )


def need(module: str, brings: str) -> Any:
    """Import an optional package, or say how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        message = f"the package {module} is not installed: install {extra(brings)}"
        raise ArgumentError(message, name="source") from None


def rows_of(row_bytes: int) -> int:
    """Return how many records of a size make a batch."""
    return max(1, min(BATCH_RECORDS, BATCH_BYTES // max(1, row_bytes)))


def choose(fields: list[str] | None, there: Mapping[str, Any] | list[str], where: str) -> list[str]:
    """Return the fields to take, or say which there are."""
    names = list(there)
    for name in fields or ():
        if name not in names:
            raise ArgumentError(f"{where} has no field {name!r}: it has {', '.join(names)}", name="fields")
    return names if fields is None else list(dict.fromkeys(fields))


def _kind(path: Path) -> str:
    if path.is_dir():
        if (path / "data.mdb").exists():
            return "lmdb"
        if (path / "dataset_dict.json").exists():
            splits = sorted(p.name for p in path.iterdir() if p.is_dir())
            raise FormatError(f"{path} holds the splits {', '.join(splits)}: give the folder of one", path=path)
        if (path / "state.json").exists() and (path / "dataset_info.json").exists():
            return "datasets"
        if (path / "MANIFEST").exists():
            raise FormatError(f"{path} is already a store: open it, or dump it first", path=path)
        return "folder"
    with path.open("rb") as file:
        head = file.read(512)
    if head[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
        return "npz"
    if head[16:20] == b"\xde\xc0\xef\xbe":
        return "lmdb"
    if path.suffix == ".arrow":
        return "datasets"
    if head[:6] == b"\x93NUMPY":
        raise FormatError(f"{path} is one array: save it with numpy.savez(file, x=array)", path=path)
    if head[257:262] == b"ustar" or head[:2] == b"\x1f\x8b":
        raise FormatError(f"{path} is an archive: unpack it, and give the folder", path=path)
    raise FormatError(
        f"{path} is of no known format: give a folder of files, a .npz file, an LMDB environment or a saved data set",
        path=path,
    )


def _only(name: str, value: object, kind: str, kinds: tuple[str, ...]) -> None:
    if value is not None and kind not in kinds:
        option = "--" + name.replace("_", "-")
        known = " and ".join(kinds)
        raise ArgumentError(f"{option} is for {known}, and the source is a {kind}: leave it out", name=name)
