"""Samples in tar archives, as WebDataset writes them: ``TarSource``."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from ..._npy import read_header
from ...array import check_dtype
from ...errors import FormatError
from .import_folder import IMAGES
from .sources import IMAGE, Batch, Record, SchemaFields, Source, check_value, choose, in_batches

_COMPRESSIONS: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"BZ": bz2.open, b"\xfd7": lzma.open}
"""How to open a compressed archive, by its first two bytes."""

_TEXTS = ("txt", "text", "json")


class TarSource(Source):
    """A sample is the consecutive members with the same path up to the first dot in the file's name.

    The rest of the file's name is the field: an image is ``image``, ``cls`` becomes the integer ``label``, ``txt`` and
    ``json`` are text, ``npy`` is an array of the shape of the first one, others are bytes. The path is the field
    ``name``. Archives are read once from their start to their end.

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

    def batches(self, start: int = 0) -> Iterator[Batch]:
        """Read all samples from number `start` on."""
        return in_batches(self._records(start), self, start)

    def _field(self, extension: str) -> str:
        if extension == "cls":
            return "label"
        return self._image if self._image is not None and f".{extension}" in IMAGES else extension

    def _records(self, start: int) -> Iterator[Record]:
        assert self.schema is not None
        for number, sample in enumerate(self._samples()):
            if number < start:
                continue
            name = sample.name.decode(errors="surrogateescape")
            where = f"{self.where}: sample {name}"
            members = {self._field(extension): data for extension, data in sample.value.items()} | {"name": sample.name}
            different = members.keys() != self.schema.keys() if self._takes_all else self.schema.keys() - members.keys()
            if different or len(members) != len(sample.value) + 1:
                raise FormatError(
                    f"{where} has {', '.join(sample.value)}, and the first one {', '.join(self.schema)}: put the "
                    "members of a sample next to each other (tar --sort=name), or choose fields that all have with "
                    "--fields",
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
    """A member of an archive that must have an end mark: tarfile takes an archive for complete without one."""

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
            f"{where} is {array.dtype.name} {array.shape}, and the first one is {spec[0]} {spec[1]}: leave the field "
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
