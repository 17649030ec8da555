"""Rows: CSV files read with their columns and numbers checked; errors name the file, the line and the column."""

from __future__ import annotations

import contextlib
import csv
import gzip
import math
import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

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

    def has_value(self, column: str) -> bool:
        """Return True if the column exists and is not blank."""
        return bool(self.get(column, "").strip())

    def number(self, column: str, *, minimum: float = 0.0, maximum: float = math.inf) -> float:
        """Return a number.

        Raises
        ------
        FormatError
            The text is not a finite number, or is out of bounds.
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
        """Return an integer, or raise the errors of `number`."""
        value = self.number(column, minimum=minimum)
        if value != int(value):
            raise self.error(column, f"a whole number from {minimum}")
        return int(value)

    def error(self, column: str, expected: str) -> errors.FormatError:
        """Return an error that names the cell and the expected value."""
        return errors.FormatError(f"{self.source}: {column} is {self[column]!r}; give {expected}", path=self.source)


@contextlib.contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[TextIO]:
    """Open a text file, compressed with gzip or not.

    Raises
    ------
    MissingFileError
        The file does not exist, or is a folder.
    FormatError
        The file is not text.
    """
    if not Path(path).is_file():
        raise errors.MissingFileError(f"{path} does not exist or is a folder: pass a file of rows", path=path)
    with open(path, "rb") as file:
        open_text: Any = gzip.open if file.read(2) == GZIP_MAGIC else open
    try:
        with open_text(path, "rt", encoding="utf-8", newline="") as text:
            yield text
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
        raise errors.FormatError(f"{path} is not CSV text ({error}): pass a file of rows", path=path) from error


def header_of(path: str | os.PathLike[str]) -> list[str]:
    """Return the names of the columns of a CSV file; an empty list if it has no line."""
    with opened(path) as text:
        return next(_records(text, path), (0, []))[1]


def read_file(path: str | os.PathLike[str], *columns: Collection[str]) -> Iterator[Row]:
    """Yield each row of a file; see `read`."""
    with opened(path) as text:
        yield from read(text, path, *columns)


def read(
    text: Iterable[str],
    path: str | os.PathLike[str],
    required: Collection[str],
    optional: Collection[str] = (),
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
    columns, expected = next(records, (0, []))[1], ", ".join([*required, *optional])
    problems = [f"an unknown column {name!r}" for name in columns if name not in {*required, *optional, *ignored}]
    problems += [f"two columns {name!r}" for name in columns if columns.count(name) > 1]
    problems += [f"no column {name!r}" for name in required if name not in columns]
    if problems:
        raise errors.FormatError(f"{path} has {problems[0]}; the columns are {expected}", path=path)
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
        raise errors.FormatError(f"{path}, line {reader.line_num}: {error}; pass a file of rows", path=path) from None
