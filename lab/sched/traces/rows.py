"""Rows: CSV files read with their columns and numbers checked; errors name the file, the line and the column."""

from __future__ import annotations

import contextlib
import csv
import gzip
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from warpwell import errors

_GZIP = b"\x1f\x8b"


class Row(dict[str, str]):
    """A row of a file: the text of each column.

    Attributes
    ----------
    line : int
        Its number, from 1.
    path : path
        Of the file, for messages.
    """

    def __init__(self, cells: Iterable[tuple[str, str]], line: int, path: str | os.PathLike[str]) -> None:
        super().__init__(cells)
        self.line = line
        self.path = path

    def has(self, column: str) -> bool:
        """Return whether the column exists and is not blank."""
        return bool(self.get(column, "").strip())

    def number(self, column: str, *, least: float = 0.0, most: float = math.inf) -> float:
        """Return a number.

        Raises
        ------
        FormatError
            It is no finite number, or out of its bounds: negative, where `least` is 0.
        """
        try:
            value = float(self[column])
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and least <= value <= most):
            bounds = f"from {least:g} up" if most == math.inf else f"from {least:g} to {most:g}"
            raise self.wrong(column, f"a number {bounds}")
        return value

    def whole(self, column: str, *, least: int = 0) -> int:
        """Return a whole number; errors as those of `number`."""
        value = self.number(column, least=least)
        if value != int(value):
            raise self.wrong(column, f"a whole number from {least} up")
        return int(value)

    def wrong(self, column: str, give: str) -> errors.FormatError:
        """Return the error about a cell; `give` says what to give instead."""
        message = f"{self.path}, line {self.line}: {column} is {self[column]!r}; give {give}"
        return errors.FormatError(message, path=self.path)


@contextlib.contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[TextIO]:
    """Open a text file, compressed with gzip or not.

    Raises
    ------
    MissingFileError
        It is not there, or a folder.
    """
    try:
        with open(path, "rb") as file:
            packed = file.read(2) == _GZIP
    except (FileNotFoundError, IsADirectoryError) as error:
        message = f"{path} {'does not exist' if isinstance(error, FileNotFoundError) else 'is a folder'}: give a file"
        raise errors.MissingFileError(message, path=path) from error
    try:
        with (
            gzip.open(path, "rt", encoding="utf-8", newline="")
            if packed
            else open(path, encoding="utf-8", newline="") as text
        ):
            yield text
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
        raise errors.FormatError(f"{path} is not CSV text ({error}): give a file of rows", path=path) from error


def header_of(path: str | os.PathLike[str]) -> list[str]:
    """Return the names of the columns of a CSV file; empty where it has no line."""
    with opened(path) as text:
        return _names(csv.reader(_content(text)))


def read(
    text: Iterable[str],
    path: str | os.PathLike[str],
    required: Iterable[str],
    optional: Iterable[str] = (),
    *,
    ignored: Iterable[str] = (),
) -> Iterator[Row]:
    """Give each row; lines that begin with ``#`` are comments.

    Parameters
    ----------
    text : iterable of str
        Lines.
    path : path
        For messages.
    required, optional, ignored : iterable of str
        Columns that must be there, may be there, and may be there but are of no use. No others may.

    Raises
    ------
    FormatError
        A column is missing or unknown, or a row has another number of values.
    """
    required, optional = list(required), list(optional)
    known = [*required, *optional, *ignored]
    reader = csv.reader(_content(text))
    records = _records(reader, path)
    columns = _names(records)
    for name in columns:
        if name not in known:
            message = f"{path} has a column {name!r} that is not known: take {', '.join(required + optional)}"
            raise errors.FormatError(message, path=path)
        if columns.count(name) > 1:
            raise errors.FormatError(f"{path} has two columns {name!r}: leave one", path=path)
    for name in required:
        if name not in columns:
            message = f"{path} has no column {name!r}: its first line must have {', '.join(required)}"
            raise errors.FormatError(message, path=path)
    for values in records:
        if not values:
            continue
        if len(values) != len(columns):
            counts = f"{len(values)} values for {len(columns)} columns"
            message = f"{path}, line {reader.line_num}: {counts}; correct the line"
            raise errors.FormatError(message, path=path)
        yield Row(zip(columns, values, strict=True), reader.line_num, path)


def name_of(path: str | os.PathLike[str]) -> str:
    """Return the name of a file, for output."""
    return Path(path).name


def _records(reader: Any, path: str | os.PathLike[str]) -> Iterator[list[str]]:
    """Give what a reader of `csv` reads; raise FormatError where it is no CSV."""
    try:
        yield from reader
    except csv.Error as error:
        raise errors.FormatError(f"{path}, line {reader.line_num}: {error}; give a file of rows", path=path) from None


def _names(records: Iterator[list[str]]) -> list[str]:
    """Return the names of the columns, from the first line that has something."""
    return [name.strip() for name in next((values for values in records if values), [])]


def _content(text: Iterable[str]) -> Iterator[str]:
    """Give every line; comments as empty ones, so that line numbers stay right."""
    for line in text:
        yield "\n" if line.startswith("#") else line
