"""Sources of single records: a folder (`FolderSource`), tar archives (`TarSource`), and an LMDB environment."""

from __future__ import annotations

import bz2
import gzip
import io
import itertools
import lzma
import os
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from ..._check import imported
from ..._npy import read_header
from ...array import check_dtype
from ...errors import ArgumentError, FormatError
from .sources import (
    IMAGE,
    Record,
    SchemaFields,
    Source,
    as_text,
    check_value,
    choose,
    read_value,
)

IMAGES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""Suffixes of images, the same as in torchvision's ``ImageFolder``."""

DATA_SETS = (".parquet", ".arrow", ".tar", ".lance", ".mdb")
"""Suffixes of data sets: such a file is hardly meant to be a value."""

LAYOUTS = ("classes", "files")

_LISTINGS = ("thumbs.db", "desktop.ini")
"""Files that Windows puts into folders of images, in lower case."""


class FolderSource(Source):
    """Files at any depth, in the order of their paths: the values of a store, or images in a folder for each class.

    In a folder of classes (ROOT/CLASS/FILE), the label is the position of CLASS among all classes in alphabetical
    order, as in torchvision's ``ImageFolder``, and the name is the path in ROOT. Hidden files and folders, and loose
    files in ROOT, are skipped. Links to folders are followed only in a folder of classes.

    Parameters
    ----------
    path : pathlib.Path
        The folder.
    rule : str, optional
        One of `KEY_RULES`; names are paths relative to the folder, with ``/``. By default images are numbered, and
        other files have names.
    layout : {"classes", "files"}, optional
        By default, a folder is one of classes if its folders have only images.

    Raises
    ------
    FormatError
        The folder has no file, a class has no image, folders form a loop, or it is not clear what the classes are.
    """

    def __init__(self, path: Path, rule: str | None, layout: str | None = None) -> None:
        if layout not in (None, *LAYOUTS):
            raise ArgumentError(f"layout is {layout!r}: choose one of {', '.join(LAYOUTS)}", name="layout")
        with os.scandir(path) as entries:
            shown = sorted((entry for entry in entries if not _is_hidden(entry.name)), key=lambda e: e.name)
        self.path = path
        self._classes = [entry.name for entry in shown if entry.is_dir()]
        loose = [entry.name for entry in shown if not entry.is_dir()]
        self.kind = "classes" if layout == "classes" or (layout is None and self._holds_classes(loose)) else "folder"
        super().__init__(path, rule or ("name" if self.kind == "folder" else "number"))
        # list all names first: they take far less memory than values, and the time left follows from their number
        if self.kind == "folder":
            self.records = self._count_files(layout)
            return
        self.schema = {"image": IMAGE, "label": "int64", "name": "str"}
        self.metadata = {"classes": {"label": self._classes}}
        self.skipped += loose
        self.records = sum(map(self._count_images, self._classes))
        if not self.records:
            raise FormatError(f"{path} holds no folder of images: check the path", path=path)

    def _records(self, start: int) -> Iterator[Record]:
        """Read the files from number `start` on; raise an error if one grows over the limit or vanishes."""
        labels = {name: label for label, name in enumerate(self._classes)}
        for number, file in enumerate(itertools.islice(self._files(), start, None), start):
            data = read_value(file)
            name = file.relative_to(self.path).as_posix()
            raw = os.fsencode(name)
            value: Any = data
            if self.schema is not None:
                value = {"image": data, "label": labels[name.partition("/")[0]], "name": as_text(raw, self.where)}
            yield Record(raw, value, len(data), (number + 1) / self.records)

    def _files(self) -> Iterator[Path]:
        if self.schema is None:
            return _walk(self.path)
        files = (file for name in self._classes for file in _walk(self.path / name, ()))
        return (file for file in files if _is_image(file))

    def _count_files(self, layout: str | None) -> int:
        count = 0
        for file in self._files():
            count += 1
            if layout is None and file.suffix in DATA_SETS:
                raise FormatError(
                    f"{self.path} holds data sets ({file.relative_to(self.path)}): give their files, or use --layout "
                    "files to store each file as a value",
                    path=self.path,
                )
        if not count:
            raise FormatError(f"{self.path} holds no file: check the path", path=self.path)
        return count

    def _count_images(self, name: str) -> int:
        count = 0
        for file in _walk(self.path / name, ()):
            if _is_image(file):
                count += 1
            elif not _is_hidden(file.name):
                self.skipped.append(file.relative_to(self.path).as_posix())
        if not count:
            raise FormatError(
                f"{self.path}: the folder {name} holds no image: remove it, or use --layout files", path=self.path
            )
        return count

    def _holds_classes(self, loose: list[str]) -> bool:
        """Return whether the folders in this folder hold nothing but images."""
        count, is_split = 0, True
        for name in self._classes:
            for file in _walk(self.path / name, ()):
                if not _is_image(file) and not _is_hidden(file.name):
                    if any(map(_is_image, _walk(self.path / name, ()))):
                        odd_file = file.relative_to(self.path)
                        self.note = (
                            f"each file is a value, because {odd_file} is not an image; --layout classes skips it"
                        )
                    return False
                count += 1
                is_split = is_split and file.parent != self.path / name
        images = [name for name in loose if name.lower().endswith(IMAGES)]
        problem = ""
        if count and is_split:
            problem = f"{self.path} holds folders of folders of images: choose one of {', '.join(self._classes[:5])}"
        elif count and images:
            problem = f"{self.path} holds folders of images and the loose image {images[0]}: move it into a folder"
        if problem:
            raise FormatError(f"{problem}, or choose --layout classes or --layout files", path=self.path)
        return count > 0


def _is_image(file: Path) -> bool:
    return file.name.lower().endswith(IMAGES) and not _is_hidden(file.name)


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name.lower() in _LISTINGS


def _walk(folder: Path, above: tuple[str, ...] | None = None) -> Iterator[Path]:
    """Yield the files of a folder in the order of their paths.

    If the real paths of the folders above it are passed in `above`, links to folders are followed.
    """
    follow = above is not None
    if above is not None:
        real = os.path.realpath(folder)
        if real in above:
            raise FormatError(f"{folder} is a link to a folder that contains it: remove the link", path=folder)
        above = (*above, real)
    with os.scandir(folder) as entries:
        listed = sorted(entries, key=lambda entry: os.fsencode(entry.name))
    for entry in listed:
        if entry.is_dir(follow_symlinks=follow):
            yield from _walk(Path(entry.path), above)
        elif entry.is_file():
            yield Path(entry.path)
        elif not entry.is_dir():
            raise FormatError(f"{entry.path} is a broken link, a pipe or a device: remove it", path=entry.path)


# -- tar archives ----------------------------------------------------------------------------------------------------

_COMPRESSIONS: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"BZ": bz2.open, b"\xfd7": lzma.open}
"""How to open a compressed archive, by its first two bytes."""

_TEXTS = ("txt", "text", "json")


class TarSource(Source):
    """Samples in tar archives: consecutive members with the same path up to the first dot in the file's name.

    The rest of the file's name is the field: an image is ``image``, ``cls`` becomes the integer ``label``, ``txt`` and
    ``json`` are text, ``npy`` is an array of the shape of the first sample's, other fields are bytes. The path is the
    field ``name``. Archives are read once from their start to their end.

    Parameters
    ----------
    paths : list of pathlib.Path
        The archives, in order; compressed ones too.
    rule : str, optional
        One of `KEY_RULES`; names are the paths of the samples. They are numbered by default.
    fields : list of str, optional
        Fields to take; all of the first sample by default.

    Raises
    ------
    FormatError
        An archive is damaged or truncated, or samples have different fields.
    """

    kind = "tar"

    def __init__(self, paths: list[Path], rule: str | None, fields: list[str] | None = None) -> None:
        super().__init__(paths[0], rule or "number")
        self.paths = paths
        self._nbytes = sum(path.stat().st_size for path in paths)
        self._image: str | None = None
        first = next(self._samples(), None)
        if first is None:
            raise FormatError(f"{self.where} holds no file: check the path", path=self.where)
        images = [name for name in first.value if f".{name}" in IMAGES]
        if len(images) == 1:
            self._image = "image"
        values = {self._field(name): data for name, data in first.value.items()}
        self._fields, self._takes_all = choose(fields, [*values, "name"], self.where), fields is None
        where = f"{self.where}: sample {first.name.decode(errors='surrogateescape')}"
        schema: SchemaFields = {name: _field_type(name, values[name], f"{where}: {name}") for name in values}
        self.schema = {name: {**schema, "name": "str"}[name] for name in self._fields}

    def _field(self, extension: str) -> str:
        if extension == "cls":
            return "label"
        return self._image if self._image is not None and f".{extension}" in IMAGES else extension

    def _records(self, start: int) -> Iterator[Record]:
        assert self.schema is not None
        for sample in itertools.islice(self._samples(), start, None):
            name = sample.name.decode(errors="surrogateescape")
            where = f"{self.where}: sample {name}"
            members = {self._field(extension): data for extension, data in sample.value.items()} | {"name": sample.name}
            different = members.keys() != self.schema.keys() if self._takes_all else self.schema.keys() - members.keys()
            if different or len(members) != len(sample.value) + 1:
                raise FormatError(
                    f"{where} has {', '.join(sample.value)}, but the first sample has {', '.join(self.schema)}: put "
                    "the members of a sample next to each other (tar --sort=name), or choose with --fields the "
                    "fields that all samples have",
                    path=self.where,
                )
            value = {field: _value(self.schema[field], members[field], f"{where}: {field}") for field in self._fields}
            yield sample._replace(value=value)

    def _samples(self) -> Iterator[Record]:
        """Yield samples as their names and their members: a dict of bytes by extension."""
        before = 0
        for path in self.paths:
            with path.open("rb") as raw:
                head = raw.read(2)
                raw.seek(0)
                opened: IO[bytes] = _COMPRESSIONS[head](raw) if head in _COMPRESSIONS else raw
                sample = Record(b"", {}, 0, 0.0)
                for name, extension, data in _members(opened, path):
                    if sample.value and (name != sample.name):
                        yield sample
                        sample = Record(b"", {}, 0, 0.0)
                    if extension in sample.value:
                        raise FormatError(f"{path}: the sample {name!r} has two members .{extension}", path=path)
                    share = (before + raw.tell()) / self._nbytes
                    sample = Record(name, {**sample.value, extension: data}, sample.nbytes + len(data), share)
                if sample.value:
                    yield sample
                before += path.stat().st_size


class _Member(tarfile.TarInfo):
    """A member of an archive. Reading raises an error if the archive has no end mark, unlike in tarfile."""

    @classmethod
    def fromtarfile(cls, tarfile_: tarfile.TarFile) -> _Member:
        try:
            return super().fromtarfile(tarfile_)
        except (tarfile.EmptyHeaderError, tarfile.TruncatedHeaderError) as error:  # type: ignore[attr-defined]
            raise tarfile.ReadError("it has no end mark") from error


def _members(file: IO[bytes], path: Path) -> Iterator[tuple[bytes, str, bytes]]:
    """Yield the files of an archive: path up to the first dot of the name, extension, and contents."""
    try:
        with tarfile.open(fileobj=file, mode="r|", tarinfo=_Member) as archive:
            while (member := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # it keeps all of them otherwise
                folder, _, base = member.name.rpartition("/")
                stem, _, extension = base.partition(".")
                if member.isdir() or base.startswith("."):
                    continue
                where = f"{path}: {member.name}"
                if not member.isreg():
                    raise FormatError(f"{where} is a link or a device: store the file itself", path=path)
                if not extension or not stem:
                    raise FormatError(
                        f"{where} has no extension, so it is not a part of a sample: unpack the archive and load the "
                        "folder",
                        path=path,
                    )
                check_value(member.size, where)
                contents = archive.extractfile(member)
                assert contents is not None
                data = contents.read()
                if len(data) != member.size:
                    raise tarfile.ReadError(f"{member.name} is cut off")
                name = f"{folder}/{stem}" if folder else stem
                yield name.encode(errors="surrogateescape"), extension.lower(), data
            while padding := archive.fileobj.read(1 << 16):
                if padding.strip(b"\0"):
                    raise tarfile.ReadError("there is data after its end mark")
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise FormatError(f"{path} is damaged or truncated ({error}): get the archive again", path=path) from None
    except OSError as error:
        if error.errno is not None:
            raise
        raise FormatError(f"{path} is damaged ({error}): get the archive again", path=path) from None


def _field_type(name: str, data: bytes, where: str) -> Any:
    extension = name.rpartition(".")[2]
    if name == "label":
        return "int64"
    if extension in _TEXTS:
        return "str"
    if extension != "npy":
        return IMAGE
    array = _array(data, where)
    return array.dtype.name, array.shape


def _value(spec: Any, data: bytes, where: str) -> Any:
    try:
        if spec == "int64":
            return int(np.int64(int(data)))
        if spec == "str":
            return data.decode()
    except (ValueError, OverflowError):
        expected = "an integer of 64 bits" if spec == "int64" else "text in UTF-8"
        raise FormatError(
            f"{where} is {data[:40]!r}, which is not {expected}: leave the field out with --fields", path=where
        ) from None
    if spec == IMAGE:
        return data
    array = _array(data, where)
    if (array.dtype.name, array.shape) != spec:
        raise FormatError(
            f"{where} is {array.dtype.name} {array.shape}, but the first is {spec[0]} {spec[1]}: leave the field "
            "out with --fields",
            path=where,
        )
    return array


def _array(data: bytes, where: str) -> np.ndarray[Any, Any]:
    file = io.BytesIO(data)
    shape, dtype = read_header(file, where)
    check_dtype(dtype, where)
    if len(data) - file.tell() != dtype.itemsize * int(np.prod(shape, dtype=np.int64)):
        raise FormatError(f"{where} is truncated: leave it out with --fields", path=where)
    return np.frombuffer(data, dtype, offset=file.tell()).reshape(shape)


# -- LMDB -----------------------------------------------------------------------------------------------------------

_DATABASE_BYTES = 48
"""Size of the record of the unnamed database that describes a named one."""


class LmdbSource(Source):
    """All records of one database, in the order of their keys, read in one transaction.

    Parameters
    ----------
    path : pathlib.Path
        Folder with ``data.mdb``, or the file of an environment without a folder.
    rule : str, optional
        One of `KEY_RULES`; names are LMDB's keys, and the default.
    database : str, optional
        A named database; the unnamed one by default.

    Raises
    ------
    ArgumentError
        The package ``lmdb`` is missing.
    FormatError
        The path is not an LMDB environment or lacks this database, or its unnamed database lists named databases.
    """

    kind = "lmdb"

    def __init__(self, path: Path, rule: str | None, database: str | None) -> None:
        super().__init__(path, rule or "name")
        self._lmdb: Any = imported("lmdb", "lmdb")
        self.path, self._is_unnamed = path, database is None
        try:
            self._environment = self._open()
        except self._lmdb.Error as error:
            raise FormatError(f"{path} cannot be read as an LMDB environment ({error})", path=path) from None
        try:
            name = None if database is None else database.encode()
            self._database = self._environment.open_db(name, create=False)
            with self._environment.begin(self._database) as transaction:
                self.records: int = transaction.stat(self._database)["entries"]
                several = self._database.flags(transaction).get("dupsort", False)
        except self._lmdb.Error as error:
            self.close()
            raise FormatError(f"{path} has no database {database!r} ({error})", path=path) from None
        if several and rule != "number":
            self.close()
            raise FormatError(
                f"{path} has several values for one key, but a store has one value per key: use --keys number to "
                "keep all",
                path=path,
            )

    def close(self) -> None:
        """Close the environment."""
        self._environment.close()

    def _records(self, start: int) -> Iterator[Record]:
        try:
            # views into the mapped file: the records before `start` are not copied
            with self._environment.begin(self._database, buffers=True) as transaction:
                found = itertools.islice(transaction.cursor(self._database), start, None)
                for number, (name, value) in enumerate(found, start):
                    if self._is_unnamed and len(value) == _DATABASE_BYTES:
                        self._require_record(transaction, bytes(name))
                    check_value(len(value), f"{self.path}: {bytes(name[:40])!r}")
                    yield Record(bytes(name), bytes(value), len(value), (number + 1) / self.records)
        except self._lmdb.Error as error:
            raise FormatError(f"{self.path} is damaged ({error})", path=self.path) from None

    def _require_record(self, transaction: Any, name: bytes) -> None:
        """Raise FormatError if a record describes a named database."""
        try:
            self._environment.open_db(name, txn=transaction, create=False)
        except self._lmdb.IncompatibleError:
            return
        shown = name.decode(errors="replace")
        raise FormatError(
            f"{self.path} holds named databases, such as {shown!r}: choose one, as in --database {shown}",
            path=self.path,
        )

    def _open(self) -> Any:
        options = {"readonly": True, "subdir": self.path.is_dir(), "max_dbs": 1, "readahead": True, "create": False}
        try:
            return self._lmdb.open(str(self.path), **options)
        except (self._lmdb.ReadonlyError, OSError, self._lmdb.Error) as error:
            # LMDB cannot create its lock file in a read-only folder, which cannot have a writer either
            if "ermission" not in str(error) and "ead-only" not in str(error):
                raise
            return self._lmdb.open(str(self.path), lock=False, **options)
