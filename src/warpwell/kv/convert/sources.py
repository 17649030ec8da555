"""The interface of sources of records (`Source`): batches, and keys made from names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...errors import ArgumentError, FormatError, ValueSizeError
from ..keys import LONGEST_KEY, as_keys, hash_of_long
from ..log.format import MAX_VALUE
from ..ragged import Ragged

#: The key of a record is its name in the source, its number there (8 bytes), or BLAKE2b of its name (16 bytes).
KEY_RULES = ("name", "number", "hash")

BATCH_BYTES = 8 << 20
BATCH_RECORDS = 4096

IMAGE = ("uint8", (None,))
"""The field of an encoded image, and of other bytes."""

SchemaFields = dict[str, Any]


@dataclass(frozen=True)
class Batch:
    """Records, as `Store.put_many` takes them.

    Attributes
    ----------
    keys : int64 [N], or list of bytes (and int)
        The keys.
    values : list of bytes, Ragged of bytes, or dict of columns
        The values; columns (lists, Ragged, arrays of NumPy or Arrow) if the source has a schema.
    nbytes : int
        Size of the values.
    share : float
        The share of the source that has been read, with this batch: 0 to 1.
    """

    keys: NDArray[np.int64] | list[Any]
    values: list[bytes] | Ragged | dict[str, Any]
    nbytes: int
    share: float

    def from_record(self, start: int) -> Batch:
        """Return the records from number `start` on."""
        values: Any = self.values
        values = {n: c[start:] for n, c in values.items()} if isinstance(values, dict) else values[start:]
        return Batch(self.keys[start:], values, self.nbytes, self.share)


class Record(NamedTuple):
    """A record of a source that reads them one at a time: its value is bytes, or a dict of fields."""

    name: bytes
    value: Any
    nbytes: int
    share: float


class Source:
    """A source of records in another format. The order of its records is always the same.

    Parameters
    ----------
    where : str or pathlib.Path
        Name of the source in messages.
    rule : str
        One of `KEY_RULES`.

    Attributes
    ----------
    kind : str
        The format, for messages.
    where : str
    rule : str
    schema : dict or None
        Fields of every record; None if values are bytes.
    records : int
        Number of records; 0 if it is known only at the end.
    metadata : dict
        Metadata of the store: under "classes", the names of the values 0, 1, ... of fields of labels.
    skipped : list of str
        Files that are not part of the records.
    note : str
        A property of the records that the user may not expect.
    """

    kind = ""
    schema: SchemaFields | None = None
    records = 0
    note = ""

    def __init__(self, where: str | Path, rule: str) -> None:
        self.where, self.rule = str(where), rule
        self.metadata: dict[str, Any] = {}
        self.skipped: list[str] = []

    def batches(self, start: int = 0) -> Iterator[Batch]:
        """Read all records from number `start` on, in bounded memory."""
        group: list[Record] = []
        nbytes = 0
        for record in self._records(start):
            group.append(record)
            nbytes += record.nbytes
            if nbytes >= BATCH_BYTES or len(group) >= BATCH_RECORDS:
                yield self._batch(group, start)
                start += len(group)
                group, nbytes = [], 0
        if group:
            yield self._batch(group, start)

    def _batch(self, group: list[Record], start: int) -> Batch:
        values: Any = [record.value for record in group]
        if isinstance(values[0], dict):
            values = {name: [value[name] for value in values] for name in values[0]}
        keys = self.keys_from_names([record.name for record in group], start, self.where)
        return Batch(keys, values, sum(record.nbytes for record in group), group[-1].share)

    def _records(self, start: int) -> Iterator[Record]:
        """Yield single records from number `start` on, for `batches` of this class."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the source (idempotent)."""

    def keys_from_names(self, names: list[bytes], start: int, where: str) -> NDArray[np.int64] | list[Any]:
        """Return a key for each name; `start` is the number of the first name.

        Raises
        ------
        ArgumentError
            A name is empty or too long for a key.
        """
        if self.rule == "number":
            return np.arange(start, start + len(names))
        if self.rule == "hash":
            return [hash_of_long(name) for name in names]
        for k, name in enumerate(names):
            if not 1 <= len(name) <= LONGEST_KEY:
                raise ArgumentError(
                    f"{where}: record {start + k} is named {name[:40]!r}, which has {len(name)} bytes but keys "
                    f"have 1 to {LONGEST_KEY}: use --keys hash (16 bytes of BLAKE2b of the name) or --keys number",
                    name="key",
                )
        return names

    def keys_from_column(self, column: NDArray[Any], start: int, where: str) -> NDArray[np.int64] | list[Any]:
        """Return keys from an array of integers, ``S`` or ``U`` strings, or uint8 [N, width].

        Raises
        ------
        FormatError
            The array has another dtype or shape.
        """
        if self.rule == "number":
            return np.arange(start, start + len(column))
        if column.dtype.kind in "SU" and column.ndim == 1:
            names = [n if isinstance(n, bytes) else n.encode() for n in column.tolist()]
            if any(b"\0" in n for n in names):
                raise FormatError(
                    f"{where} is {column.dtype} and holds zeros, which cannot be distinguished from padding at the end"
                    " of a name: save integers, or uint8 [N, width]",
                    path=where,
                )
            return self.keys_from_names(names, start, where)
        try:
            keys = as_keys(column)
        except ArgumentError as error:
            raise FormatError(f"{where}: {error}", path=where) from None
        if self.rule == "name" and keys.all_integers:
            return keys.numbers()
        return self.keys_from_names([keys.raw(k) for k in range(keys.size)], start, where)


def require_names(rule: str | None, key_field: str | None, where: str) -> None:
    """Raise ArgumentError if a rule makes keys from names, but rows have no names."""
    if rule in ("name", "hash") and key_field is None:
        raise ArgumentError(
            f"--keys {rule} needs names, but rows of {where} are numbered: add --key-field", name="keys"
        )


def check_value(nbytes: int, where: str) -> None:
    """Raise ValueSizeError for a value over the limit; `where` names it in the message."""
    if nbytes > MAX_VALUE:
        raise ValueSizeError(
            f"{where} has {nbytes} bytes, but a value has at most {MAX_VALUE}: split it", name="value", nbytes=nbytes
        )


def as_text(raw: bytes, where: str) -> str:
    """Return bytes in UTF-8 as text; raise FormatError if they are not."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise FormatError(f"{where} holds {raw[:40]!r}, which is not text in UTF-8: convert it", path=where) from None


def read_value(path: Path) -> bytes:
    """Return the bytes of a file; raise ValueSizeError if they are more than a value may have."""
    check_value(path.stat().st_size, str(path))
    return path.read_bytes()


def rows_of(row_bytes: int) -> int:
    """Return the number of records of `row_bytes` bytes in one batch."""
    return max(1, min(BATCH_RECORDS, BATCH_BYTES // max(1, row_bytes)))


def choose(fields: list[str] | None, available: Mapping[str, Any] | list[str], where: str) -> list[str]:
    """Return the fields to load; raise ArgumentError, which lists the fields, for an unknown one."""
    names = list(available)
    if fields == []:
        raise ArgumentError(f"no field of {where} was chosen: it has {', '.join(names)}", name="fields")
    for name in fields or ():
        if name not in names:
            raise ArgumentError(f"{where} has no field {name!r}: it has {', '.join(names)}", name="fields")
    return names if fields is None else list(dict.fromkeys(fields))
