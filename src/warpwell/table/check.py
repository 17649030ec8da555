"""`check`: read all of a table, and compare it with its checksums."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from .._check import checked_callable, checked_path
from ..errors import FormatError, WarpwellError
from ..kv import Problem
from . import arrow as pa
from .arrow_file import ArrowFile
from .extent import validate
from .library import line_of
from .table import Table, slices, table_parts
from .zones import CHECKED_BYTES, SUFFIX, compute_zones, file_checksums, load_zones

_MAX_PROBLEMS = 10
"""Maximum number of problems that are reported per file."""


@dataclass
class TableCheck:
    """The result of `check`.

    Attributes
    ----------
    rows : int
        Number of rows in the files that match their checksums.
    nbytes : int
        Number of bytes that were read.
    problems : list of Problem
        Each has a path, a byte of the file or None, and a description.
    """

    rows: int = 0
    nbytes: int = 0
    problems: list[Problem] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        """Whether nothing is damaged."""
        return not self.problems


def check(path: str | os.PathLike[str], *, progress: Callable[[str, int, int], None] | None = None) -> TableCheck:
    """Read all of a table, and report what is damaged.

    Each MiB of a file that has zones is compared with its checksum, and the zones with the rows. Offsets, codes, and
    the text of strings are checked.

    Parameters
    ----------
    path : path
    progress : callable, optional
        Called as ``progress("verify", bytes, total)``.

    Raises
    ------
    MissingFileError, FormatError
        It is not a table, or one file that is too damaged to be opened.
    """
    name = checked_path(path)
    checked_callable(progress, "progress")
    report = TableCheck()
    files = [part["path"] for part in table_parts(name)]
    sizes = [os.path.getsize(file) if os.path.exists(file) else 0 for file in files]
    for file, size in zip(files, sizes, strict=True):
        report.problems += islice(_problems(file, size, report, os.path.isdir(name)), _MAX_PROBLEMS)
        report.nbytes += size
        if progress is not None:
            progress("verify", report.nbytes, sum(sizes))
    return report


def _problems(path: str, size: int, report: TableCheck, is_folder: bool) -> Iterator[Problem]:
    """Compare a file with its checksums, follow offsets and codes, read text, count nulls, and compute zones again."""
    zones = None
    try:
        try:
            zones = load_zones(path)
        except FileNotFoundError:
            if is_folder:
                yield Problem(path + SUFFIX, None, "is missing: the file cannot be compared with its checksums")
        except FormatError as error:
            yield Problem(path + SUFFIX, None, str(error))
        if zones is not None:
            if size != zones.nbytes:
                yield Problem(path, min(size, zones.nbytes), f"has {size} bytes, but {zones.nbytes} were written")
                return
            checksums = enumerate(zip(file_checksums(path), zones.checksums, strict=True))
            damaged = [number for number, (checksum, written) in checksums if checksum != written]
            yield from (
                Problem(path, k * CHECKED_BYTES, "the MiB from here differs from its checksum") for k in damaged
            )
            if damaged:
                return
        with Table(path, [ArrowFile(path)], {}) as table:
            report.rows += table.rows
            for number, name in enumerate(table.names):
                for run in table[number].runs:
                    try:
                        validate(run.array)
                    except pa.ArrowException as error:
                        yield Problem(path, None, f"column {name!r}, rows from {run.first}: {line_of(error)}")
            if zones is not None and not zones.equals(compute_zones(table.schema, slices(table))):
                yield Problem(path + SUFFIX, None, "differs from the rows: run ww.table.index again")
    except (WarpwellError, OSError) as error:
        if not is_folder and zones is None:
            raise
        yield Problem(path, None, str(error))
