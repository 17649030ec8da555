"""Import records into a store: ``open_source``, the table of formats, and ``load``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ...errors import ArgumentError, FormatError, MissingFileError
from .import_datasets import DatasetSource
from .import_folder import FolderSource
from .import_lmdb import LmdbSource
from .import_npz import NpzSource
from .sources import KEY_RULES, KeyRule, RecordSource

_COMMIT_BYTES = 64 << 20
_COMMIT_RECORDS = 1 << 18

Progress = Callable[[str, int, int], None]


class Target(Protocol):
    """The methods of a store that `load` calls."""

    def put_many(self, keys: Any, values: Any) -> Any:
        """Write records."""

    def commit(self) -> Any:
        """Make them durable."""


@dataclass(frozen=True)
class LoadReport:
    """The result of `load`.

    Attributes
    ----------
    records : int
        Records that were read and put. A key that occurs twice counts twice; its last value stays.
    nbytes : int
        Size of their values.
    """

    records: int
    nbytes: int


class Format(NamedTuple):
    """A format of records: the function that opens a source, and the options that it accepts."""

    open: Callable[..., RecordSource]
    options: tuple[str, ...]


FORMATS = {
    "folder": Format(FolderSource, ()),
    "npz": Format(NpzSource, ("key_field", "fields")),
    "lmdb": Format(LmdbSource, ("database",)),
    "datasets": Format(DatasetSource.open, ("key_field", "fields")),
}
"""Formats by what `_kind` returns for a path."""


def open_source(
    path: str | Path,
    *,
    keys: str | None = None,
    key_field: str | None = None,
    fields: list[str] | None = None,
    database: str | None = None,
) -> RecordSource:
    """Open a source of records; the format is recognized by its content.

    Parameters
    ----------
    path : path-like
        A folder of files (each file a value), a ``.npz`` file (each row a record), an LMDB environment (folder or
        file), or a data set that Hugging Face's ``datasets`` saved with ``save_to_disk`` or as ``.arrow``.
    keys : {"name", "number", "hash"}, optional
        What the keys are. A name is a file's path in the folder, an LMDB key, or what `key_field` holds; it is the
        default if the source has names. A number counts from 0 in the order of the source.
    key_field : str, optional
        Array or column whose items are the keys. For a ``.npz`` file the default is its array ``keys``, if there is
        one.
    fields : list of str, optional
        Arrays or columns to take; all by default.
    database : str, optional
        Named database of an LMDB environment.

    Returns
    -------
    RecordSource
        The open source; only its head has been read.

    Raises
    ------
    MissingFileError
        No such file or folder.
    FormatError
        The format is unknown, or the source is damaged.
    ArgumentError
        The format does not have an option, or a package is missing.
    """
    path = Path(path)
    if keys is not None and keys not in KEY_RULES:
        raise ArgumentError(f"keys is {keys!r}: choose one of {', '.join(KEY_RULES)}", name="keys")
    if not path.exists():
        raise MissingFileError(f"{path} does not exist: give a folder, a .npz file or an LMDB environment", path=path)
    kind = _kind(path)
    options = {"key_field": key_field, "fields": fields, "database": database}
    for name, value in options.items():
        if value is not None and name not in FORMATS[kind].options:
            formats = " and ".join(label for label, form in FORMATS.items() if name in form.options)
            option = "--" + name.replace("_", "-")
            raise ArgumentError(f"{option} is for {formats}, and the source is a {kind}: leave it out", name=name)
    return FORMATS[kind].open(path, KeyRule(keys), **{name: options[name] for name in FORMATS[kind].options})


def load(source: RecordSource, store: Target, progress: Progress | None = None) -> LoadReport:
    """Put all records of a source into a store, in bounded memory; commit from time to time and at the end.

    An interrupted load leaves a store with the records up to some batch.

    Parameters
    ----------
    source : RecordSource
        The source.
    store : Store
        The target; it must have the source's schema.
    progress : callable, optional
        Called after each batch as ``progress("load", records, total)``; total is 0 if it is not known.
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
    return LoadReport(records, nbytes)


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
        f"{path} has an unknown format: give a folder of files, a .npz file, an LMDB environment or a saved data set",
        path=path,
    )
