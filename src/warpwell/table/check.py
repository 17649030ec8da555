"""`check`: read all of a table, and compare it with its checksums."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .._check import checked_callable, checked_path
from ..errors import DTypeError, FormatError, MediumError, WarpwellError
from ..graph.npy import HEADER_BYTES
from ..kv import Problem, crc32c
from .column import ColumnRun
from .column_files import CHECKED_BYTES
from .folder import is_table_folder, read_description
from .table import Table, open_table

_ROWS = 1 << 20
_PROBLEMS_OF_A_FILE = 10


@dataclass(frozen=True)
class TableCheck:
    """What `check` found.

    Attributes
    ----------
    rows : int
    nbytes : int
        Read.
    problems : list of Problem
        Each has a path, a byte of the file or None, and what is wrong there.
    unchecked : list of str
        Columns that tables do not have.
    """

    rows: int
    nbytes: int = 0
    problems: list[Problem] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        """Whether nothing is damaged."""
        return not self.problems


def check(path: str | os.PathLike[str], *, progress: Callable[[str, int, int], None] | None = None) -> TableCheck:
    """Read all of a table, and report what is damaged.

    Of a folder, each MiB is compared with its checksum. Of an Arrow file, which has none, and of a folder, offsets,
    codes, and the text of strings are followed.

    Parameters
    ----------
    path : path
    progress : callable, optional
        Called as ``progress("verify", bytes, total)``.

    Raises
    ------
    MissingFileError, FormatError
        It is no table, or so damaged that it cannot be opened.
    """
    name = checked_path(path)
    checked_callable(progress, "progress")
    report = progress or (lambda stage, done, total: None)
    problems: list[Problem] = []
    nbytes = 0
    if is_table_folder(name):
        nbytes = _check_files(name, problems, report)
    bad = {os.path.abspath(one.path) for one in problems}
    unchecked = []
    table = open_table(name)
    try:
        for number, column in enumerate(table.names):
            try:
                _check_column(table, number, bad, problems)
            except DTypeError:
                unchecked.append(column)
            except WarpwellError as error:
                at = getattr(error, "path", None) or name
                if _stem(at) not in map(_stem, bad):  # else it follows from what is reported
                    problems.append(_problem(at, None, str(error)))
        if not is_table_folder(name):
            nbytes = os.path.getsize(name)
    finally:
        _close(table, problems)
    return TableCheck(table.rows, nbytes, problems, unchecked)


def _stem(path: str | os.PathLike[str]) -> str:
    """Return what the files of one column begin with."""
    folder, name = os.path.split(os.path.abspath(path))
    return os.path.join(folder, name.split(".")[0])


def _close(table: Table, problems: list[Problem]) -> None:
    try:
        table.close()
    except MediumError as error:
        if not problems:
            problems.append(_problem(table.path, None, str(error)))


def _problem(path: str | os.PathLike[str], offset: int | None, what: str) -> Problem:
    return Problem(path=os.fspath(path), offset=offset, what=what)


def _check_files(name: str, problems: list[Problem], report: Callable[[str, int, int], None]) -> int:
    """Compare each MiB of each file with its checksum; return how many bytes were read."""
    description = read_description(name)
    files = [
        (os.path.join(name, str(part["folder"]), file["name"]), file["crc32c"])
        for part in description["parts"]
        for column in part["columns"]
        for file in column["files"].values()
    ]
    total = sum(len(sums) // 8 * CHECKED_BYTES for _, sums in files)
    done = 0
    for path, sums in files:
        found: list[Problem] = []
        try:
            with open(path, "rb", buffering=0) as file:
                done += _check_file(file, path, sums, found)
        except OSError as error:
            found.append(_problem(path, None, f"cannot be read: {error.strerror or error}"))
        problems += found[:_PROBLEMS_OF_A_FILE]
        report("verify", min(done, total), total)
    return done


def _check_file(file: Any, path: str, sums: str, found: list[Problem]) -> int:
    """Compare a file with its checksums; return how many bytes were read."""
    size = os.fstat(file.fileno()).st_size
    pieces = -(-max(size - HEADER_BYTES, 0) // CHECKED_BYTES)
    if pieces != len(sums) // 8 or size < HEADER_BYTES:
        found.append(_problem(path, size, f"has {size} bytes, which is not what was written"))
    room = np.empty(CHECKED_BYTES, np.uint8)
    done = 0
    for k in range(min(pieces, len(sums) // 8)):
        at = HEADER_BYTES + k * CHECKED_BYTES
        want, got = min(size - at, CHECKED_BYTES), 0
        while got < want:
            count = os.preadv(file.fileno(), [room[got:want].data], at + got)
            if count == 0:
                break
            got += count
        done += got
        if crc32c(room[:got]) != int(sums[8 * k : 8 * k + 8], 16):
            found.append(_problem(path, at, f"{got} bytes differ from what was written"))
    return done


def _check_column(table: Table, number: int, bad: set[str], problems: list[Problem]) -> None:
    """Follow offsets and codes, read text, and count nulls, in files whose checksums are right."""
    for run in table[number].runs:
        paths = {extent.path for extent in run.extents}
        if paths & bad:
            continue
        path = min(paths, default=table.path)
        try:
            if run.layout.kind in ("text", "views", "codes"):
                for first in range(0, run.rows, _ROWS):
                    run.arrow(first, min(_ROWS, run.rows - first), codes=True)
            if run.valid is not None and run.rows - _ones(run) != run.nulls:
                problems.append(
                    _problem(
                        path,
                        run.valid.offset,
                        f"{run.rows - _ones(run)} of {run.rows} rows from row "
                        f"{run.first} are null, and {run.nulls} should be",
                    )
                )
        except (FormatError, MediumError) as error:
            problems.append(_problem(path, None, str(error)))


def _ones(run: ColumnRun) -> int:
    """Return how many rows are valid."""
    assert run.valid is not None
    bits = run.valid.numpy()
    tail = int(bits[-1]) & ((1 << (run.rows - 1) % 8 + 1) - 1) if run.rows else 0
    return int(np.bitwise_count(bits[:-1]).sum(dtype=np.int64)) + tail.bit_count()
