"""Rows: CSV files read with their columns and numbers checked; errors name the file, the line and the column."""

from __future__ import annotations

import contextlib
import csv
import gzip
import math
import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TextIO

from warpwell import errors

GZIP_MAGIC = b"\x1f\x8b"


class Row(dict[str, str]):
    """A row of a file: the text of each column.

    Attributes
    ----------
    source : str
        The file and the number of the line, for messages.
    """

    source: str

    def has(self, column: str) -> bool:
        """Return True if the column exists and is not blank."""
        return bool(self.get(column, "").strip())

    def number(self, column: str, *, minimum: float = 0.0, maximum: float = math.inf) -> float:
        """Return a number.

        Raises
        ------
        FormatError
            It is not a finite number, or is out of bounds.
        """
        try:
            value = float(self[column])
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and minimum <= value <= maximum):
            upper = "" if maximum == math.inf else f" to {maximum:g}"
            raise self.error(column, f"a number from {minimum:g}{upper}")
        return value

    def integer(self, column: str, *, minimum: int = 0) -> int:
        """Return an integer; errors as those of `number`."""
        value = self.number(column, minimum=minimum)
        if value != int(value):
            raise self.error(column, f"a whole number from {minimum}")
        return int(value)

    def error(self, column: str, expected: str) -> errors.FormatError:
        """Return the error about a cell."""
        return errors.FormatError(f"{self.source}: {column} is {self[column]!r}; give {expected}", path=self.source)


@contextlib.contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[TextIO]:
    """Open a text file, compressed with gzip or not.

    Raises
    ------
    MissingFileError
        It does not exist, or is a folder.
    FormatError
        It is not text.
    """
    if not Path(path).is_file():
        raise errors.MissingFileError(f"{path} does not exist or is a folder: give a file of rows", path=path)
    with open(path, "rb") as file:
        is_packed = file.read(2) == GZIP_MAGIC
    try:
        with (
            gzip.open(path, "rt", encoding="utf-8", newline="")
            if is_packed
            else open(path, encoding="utf-8", newline="") as text
        ):
            yield text
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
        raise errors.FormatError(f"{path} is not CSV text ({error}): give a file of rows", path=path) from error


def header_of(path: str | os.PathLike[str]) -> list[str]:
    """Return the names of the columns of a CSV file; an empty list if it has no line."""
    with opened(path) as text:
        return next(_records(text, path), (0, []))[1]


def read(
    text: Iterable[str],
    path: str | os.PathLike[str],
    required: Collection[str],
    optional: Collection[str] = (),
    *,
    ignored: Collection[str] = (),
) -> Iterator[Row]:
    """Yield each row; lines that begin with ``#`` are comments.

    Parameters
    ----------
    text : iterable of str
        Lines.
    path : path
        For messages.
    required, optional, ignored : collection of str
        Columns that must exist, may exist, and may exist but are not used. Other columns are errors.

    Raises
    ------
    FormatError
        A column is missing or unknown, or a row has another number of values.
    """
    records = _records(text, path)
    columns = next(records, (0, []))[1]
    for name in columns:
        if name not in {*required, *optional, *ignored}:
            message = f"{path} has a column {name!r} that is not known: take {', '.join([*required, *optional])}"
            raise errors.FormatError(message, path=path)
        if columns.count(name) > 1:
            raise errors.FormatError(f"{path} has two columns {name!r}: leave one", path=path)
    for name in required:
        if name not in columns:
            message = f"{path} has no column {name!r}: its first line must have {', '.join(required)}"
            raise errors.FormatError(message, path=path)
    for line, values in records:
        if len(values) != len(columns):
            message = f"{path}, line {line}: {len(values)} values for {len(columns)} columns; correct the line"
            raise errors.FormatError(message, path=path)
        row = Row(zip(columns, values, strict=True))
        row.source = f"{path}, line {line}"
        yield row


def _records(text: Iterable[str], path: str | os.PathLike[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield the number and values of each line that has values. A comment counts as an empty line."""
    reader = csv.reader("\n" if line.startswith("#") else line for line in text)
    try:
        for number, values in enumerate(filter(None, reader)):
            yield reader.line_num, values if number else [name.strip() for name in values]
    except csv.Error as error:
        raise errors.FormatError(f"{path}, line {reader.line_num}: {error}; give a file of rows", path=path) from None
