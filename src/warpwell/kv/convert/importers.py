"""Import records into a store: ``open_source``, the table of formats, and ``load``."""

from __future__ import annotations

import glob
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import ArgumentError, FormatError, MissingFileError
from ..schema import as_schema
from ..store import Store
from .arrow import ArrowSource, data_set_files
from .import_files import FolderSource, LmdbSource, TarSource
from .import_npz import NpzSource
from .sources import KEY_RULES, Batch, Source

_COMMIT_BYTES = 8 << 20
"""Bytes of values between commits: a killed load leaves at most the values of a commit and a batch as dead bytes."""
_COMMIT_RECORDS = 1 << 18

_TAR = re.compile(r"\.(tar|tgz|tar\.(gz|bz2|xz))$", re.IGNORECASE)
_SPLIT = re.compile(r"(train|training|test|testing|eval|evaluation|valid|validation|val|dev)(?![a-z])")


@dataclass(frozen=True)
class LoadReport:
    """The result of `load`, or its state so far.

    Attributes
    ----------
    records : int
        Records that were read and put.
    nbytes : int
        Size of their values.
    skipped : int
        Records that the store had before.
    share : float
        The share of the source that has been read: 0 to 1.
    """

    records: int
    nbytes: int
    skipped: int
    share: float


Progress = Callable[[LoadReport], object]


class Format(NamedTuple):
    """A format of records: the function that opens a source, and the options that it accepts."""

    open: Callable[..., Source]
    options: tuple[str, ...]
    takes_several: bool = False


FORMATS = {
    "folder": Format(FolderSource, ("layout",)),
    "tar": Format(TarSource, ("fields",), True),
    "parquet": Format(ArrowSource, ("key_field", "fields"), True),
    "arrow": Format(ArrowSource, ("key_field", "fields"), True),
    "lmdb": Format(LmdbSource, ("database",)),
    "npz": Format(NpzSource, ("key_field", "fields")),
}
"""Formats by name; see `_recognized`."""


def open_source(
    source: str | Path | Sequence[str | Path],
    *,
    keys: str | None = None,
    key_field: str | None = None,
    fields: list[str] | None = None,
    database: str | None = None,
    layout: str | None = None,
) -> Source:
    """Open a source of records; the format is recognized by its content.

    Parameters
    ----------
    source : path-like or list of path-like
        A folder of images in a folder for each class, or of other files (each file a value); tar archives of samples,
        as WebDataset writes them; Parquet or Arrow files; a folder of tar archives or of Parquet files; a data set that
        Hugging Face's ``datasets`` saved with ``save_to_disk``; an LMDB environment (folder or file); a ``.npz`` file
        (each row a record). A name with ``*`` is a pattern.
    keys : {"name", "number", "hash"}, optional
        What the keys are. A name is a file's path in the folder, a sample's path in a tar archive, an LMDB key, or what
        `key_field` holds; it is the default for LMDB, `key_field`, dumps and a folder without classes. A number counts
        from 0 in the order of the source.
    key_field : str, optional
        Array or column whose items are the keys. For a ``.npz`` file the default is its array ``keys``, if there is
        one.
    fields : list of str, optional
        Arrays, columns or members of samples to take; all by default.
    database : str, optional
        Named database of an LMDB environment.
    layout : {"classes", "files"}, optional
        Whether the folders in a folder are classes of images, if that is not clear.

    Returns
    -------
    Source
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
    if keys is not None and keys not in KEY_RULES:
        raise ArgumentError(f"keys is {keys!r}: choose one of {', '.join(KEY_RULES)}", name="keys")
    paths = [path for item in ([source] if isinstance(source, str | Path) else source) for path in _expanded(item)]
    kinds: dict[str, list[Path]] = {}
    for path in paths:
        kind, files = _recognized(path)
        kinds.setdefault(kind, []).extend(files)
    kind, files = next(iter(kinds.items()))
    if len(kinds) > 1 or (len(files) > 1 and not FORMATS[kind].takes_several):
        raise ArgumentError(
            f"{len(paths)} sources were given ({' and '.join(kinds)}): pass one, or several files of tar, Parquet or "
            "Arrow",
            name="source",
        )
    options = {"key_field": key_field, "fields": fields, "database": database, "layout": layout}
    for name, value in options.items():
        if value is not None and name not in FORMATS[kind].options:
            formats = " and ".join(label for label, form in FORMATS.items() if name in form.options)
            option = "--" + name.replace("_", "-")
            raise ArgumentError(f"{option} is for {formats}, but the source is a {kind}: leave it out", name=name)
    opened: Any = files if FORMATS[kind].takes_several else files[0]
    return FORMATS[kind].open(opened, keys, **{name: options[name] for name in FORMATS[kind].options})


def load(source: Source, store: Store, progress: Progress | None = None) -> LoadReport:
    """Put all records of a source into a store, in bounded memory; commit from time to time and at the end.

    An interrupted load leaves a store with the first records of the source. The next load skips these records, after a
    check of their number and of the last one.

    Parameters
    ----------
    source : Source
        The source.
    store : Store
        The target; it must have the source's schema.
    progress : callable, optional
        Called after each batch with the state so far.

    Raises
    ------
    FormatError
        The store has other records than the first ones of the source, or a key occurs twice.
    """
    skipped = len(store)
    report = committed = LoadReport(0, 0, skipped, 0.0)
    for batch in _unloaded(source, store):
        _check_new(source, store, batch)
        store.put_many(batch.keys, batch.values)
        report = LoadReport(report.records + len(batch.keys), report.nbytes + batch.nbytes, skipped, batch.share)
        if report.records - committed.records >= _COMMIT_RECORDS or report.nbytes - committed.nbytes >= _COMMIT_BYTES:
            store.commit()
            committed = report
        if progress is not None:
            progress(report)
    store.commit()
    return report


def _unloaded(source: Source, store: Store) -> Iterator[Batch]:
    """Yield the records of a source that a store does not have; check that it has the preceding records."""
    count = len(store)
    if not count:
        yield from source.batches()
        return
    batches = source.batches(count - 1)
    last = next(batches, None)
    if last is None or not _is_same(source, last, store.get(last.keys[0])):
        reason = "has fewer records" if last is None else f"has another record {count - 1:,}"
        raise FormatError(
            f"{store.path} has {count:,} records, and {source.where} {reason}: the store was loaded from "
            "another source, or the source has changed. Load into a new store, or replace this one with --overwrite",
            path=store.path,
        )
    yield from (batch for batch in itertools.chain([last.from_record(1)], batches) if len(batch.keys))


def _is_same(source: Source, batch: Batch, stored: Any) -> bool:
    """Return whether the first record of a batch is equal to a value of the store."""
    schema = as_schema(source.schema)
    if schema is None:
        return bool(stored == batch.values[0])  # type: ignore[index]
    if stored is None:
        return False
    first = {name: column[:1] for name, column in batch.values.items()}  # type: ignore[union-attr]
    return bytes(schema.pack(first, 1)[0]) == bytes(schema.pack_one(stored))


def _check_new(source: Source, store: Store, batch: Batch) -> None:
    """Raise FormatError if a key of a batch occurs twice, because its first record would be lost."""
    if source.rule == "number":
        return
    checked: set[Any] = set()
    for key in batch.keys if isinstance(batch.keys, list) else batch.keys.tolist():
        if key in checked or key in store:
            raise FormatError(
                f"{source.where}: the key {key!r} occurs twice, but a store has one record per key: use --keys number",
                path=source.where,
            )
        checked.add(key)


def _expanded(item: str | Path) -> list[Path]:
    """Return the files that a name with ``*`` means, in the order of their names, or the path itself."""
    path = Path(item)
    if path.exists():
        return [path]
    found = sorted(map(Path, glob.glob(str(item))))
    if not found:
        raise MissingFileError(f"{path} does not exist: give a file, a folder, or a pattern such as *.tar", path=path)
    return found


def _recognized(path: Path) -> tuple[str, list[Path]]:
    """Return the format of a path and the files to read."""
    if path.is_dir():
        return _recognized_folder(path)
    with path.open("rb") as file:
        head = file.read(512)
    if head[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
        return "npz", [path]
    if head[16:20] == b"\xde\xc0\xef\xbe":
        return "lmdb", [path]
    if head[:4] == b"PAR1":
        return "parquet", [path]
    if path.suffix == ".arrow" or head[:6] == b"ARROW1":
        return "arrow", [path]
    if head[257:262] == b"ustar" or _TAR.search(path.name):
        return "tar", [path]
    if head[:6] == b"\x93NUMPY":
        raise FormatError(f"{path} is one array: save it with numpy.savez(file, x=array)", path=path)
    raise FormatError(
        f"{path} has an unknown format: give a folder, or a .tar, .parquet, .arrow, .npz or LMDB file", path=path
    )


def _recognized_folder(path: Path) -> tuple[str, list[Path]]:
    if (path / "data.mdb").exists():
        return "lmdb", [path]
    if (path / "dataset_dict.json").exists():
        splits = sorted(p.name for p in path.iterdir() if p.is_dir())
        raise FormatError(f"{path} has the splits {', '.join(splits)}: pass the folder of one split", path=path)
    if (path / "state.json").exists() and (path / "dataset_info.json").exists():
        return "arrow", data_set_files(path)
    if (path / "MANIFEST").exists():
        raise FormatError(f"{path} is already a store: open it, or dump it first", path=path)
    files = sorted(file for folder in (path, path / "data") for file in folder.glob("*.parquet"))
    if files:
        splits = sorted({found.group() for file in files if (found := _SPLIT.match(file.name))})
        if len(splits) > 1:
            first = next(file for file in files if file.name.startswith(splits[-1]))
            raise FormatError(
                f"{path} holds the splits {', '.join(splits)}: pass the files of one split, such as "
                f"'{first.parent}/{splits[-1]}-*.parquet'",
                path=path,
            )
        return "parquet", files
    archives = sorted(file for file in path.iterdir() if not file.name.startswith("."))
    if archives and all(_TAR.search(file.name) for file in archives):
        return "tar", archives
    return "folder", [path]
