"""The interface of sources of records (`RecordSource`): batches, and keys made from names."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ...errors import ArgumentError, FormatError, ValueSizeError
from ..keys import MAX_KEY
from ..log.format import MAX_VALUE
from ..ragged import Ragged

#: The key of a record is its name in the source, its number there (8 bytes), or BLAKE2b of its name (16 bytes).
KEY_RULES = ("name", "number", "hash")

BATCH_BYTES = 8 << 20
BATCH_RECORDS = 4096

SchemaFields = dict[str, tuple[str, tuple[int | None, ...]]]


@dataclass(frozen=True)
class Batch:
    """Records, as `Store.put_many` takes them.

    Attributes
    ----------
    keys : int64 [N], or list of bytes (and int)
        The keys.
    values : list of bytes, Ragged of bytes, or dict of arrays [N, ...] and Ragged
        The values; a dict if the source has a schema.
    nbytes : int
        Size of the values.
    """

    keys: NDArray[np.int64] | list[Any]
    values: list[bytes] | Ragged | dict[str, Any]
    nbytes: int


class RecordSource(Protocol):
    """A source of records in another format."""

    @property
    def kind(self) -> str:
        """The kind of source, for messages: "folder", "npz", "lmdb", "datasets"."""

    @property
    def schema(self) -> SchemaFields | None:
        """Fields of every record; None where values are bytes."""

    @property
    def records(self) -> int:
        """Number of records; 0 if it is known only at the end."""

    def batches(self) -> Iterator[Batch]:
        """Read all records, in bounded memory."""

    def close(self) -> None:
        """Close the source (idempotent)."""


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
        """Return a key for each name; `start` is the number of the first name.

        Raises
        ------
        ArgumentError
            A name is empty or has more than 16 bytes.
        """
        if self.rule == "number":
            return self.from_numbers(start, len(names))
        if self.rule == "hash":
            return [hashlib.blake2b(name, digest_size=MAX_KEY).digest() for name in names]
        for k, name in enumerate(names):
            if not 1 <= len(name) <= MAX_KEY:
                raise ArgumentError(
                    f"{where}: record {start + k} is named {name[:40]!r}, which has {len(name)} bytes but keys "
                    f"have 1 to {MAX_KEY}: use --keys hash (16 bytes of BLAKE2b of the name) or --keys number",
                    name="key",
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
            The array has another dtype or shape.
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
                    f"{where} is {column.dtype} and holds zeros, which cannot be distinguished from padding at the end"
                    " of a name: save uint8 [N, 1 to 16]",
                    path=where,
                )
        else:
            raise FormatError(
                f"{where} is {column.dtype} of shape {column.shape}: take integers [N], strings [N] or uint8 [N, 16]",
                path=where,
            )
        return self.from_names(names, start, where)


def in_batches(records: Iterable[tuple[bytes, bytes]], rule: KeyRule, path: Path) -> Iterator[Batch]:
    """Gather names and values, which arrive one at a time, into batches that fit into memory."""
    names: list[bytes] = []
    values: list[bytes] = []
    nbytes = start = 0
    for name, value in records:
        names.append(name)
        values.append(value)
        nbytes += len(value)
        if nbytes >= BATCH_BYTES or len(names) >= BATCH_RECORDS:
            yield Batch(rule.from_names(names, start, str(path)), values, nbytes)
            start += len(names)
            names, values, nbytes = [], [], 0
    if names:
        yield Batch(rule.from_names(names, start, str(path)), values, nbytes)


def check_value(nbytes: int, where: str) -> None:
    """Raise ValueSizeError for a value over the limit; `where` names it in the message."""
    if nbytes > MAX_VALUE:
        raise ValueSizeError(
            f"{where} has {nbytes} bytes, but a value has at most {MAX_VALUE}: split it", name="value", nbytes=nbytes
        )


def rows_of(row_bytes: int) -> int:
    """Return the number of records of a size in one batch."""
    return max(1, min(BATCH_RECORDS, BATCH_BYTES // max(1, row_bytes)))


def choose(fields: list[str] | None, available: Mapping[str, Any] | list[str], where: str) -> list[str]:
    """Return the fields to load; raise ArgumentError, which lists the fields, for an unknown one."""
    names = list(available)
    for name in fields or ():
        if name not in names:
            raise ArgumentError(f"{where} has no field {name!r}: it has {', '.join(names)}", name="fields")
    return names if fields is None else list(dict.fromkeys(fields))
