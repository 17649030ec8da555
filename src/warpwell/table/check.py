"""`check`: read all of a table, and compare it with its checksums."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from .._check import checked_callable, checked_path
from ..errors import FormatError, MediumError, WarpwellError
from ..kv import Problem
from .arrow_file import ArrowFile
from .column import ColumnRun
from .table import Table, table_parts, zone_columns
from .zones import CHECKED_BYTES, SUFFIX, Zones, compute_zones, file_checksums, load_zones

_ROWS = 1 << 20
_MAX_PROBLEMS = 10
"""Problems that are reported of one file."""


@dataclass(frozen=True)
class TableCheck:
    """The result of `check`.

    Attributes
    ----------
    rows : int
    nbytes : int
        Read.
    problems : list of Problem
        Each has a path, a byte of the file or None, and a description.
    """

    rows: int
    nbytes: int = 0
    problems: list[Problem] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        """Whether nothing is damaged."""
        return not self.problems


def check(path: str | os.PathLike[str], *, progress: Callable[[str, int, int], None] | None = None) -> TableCheck:
    """Read all of a table, and report what is damaged.

    Each MiB of a file that has zones is compared with its checksum, and the zones with the rows. Offsets, codes, and
    the text of strings are followed.

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
    report = progress or (lambda stage, done, total: None)
    is_folder = os.path.isdir(name)
    files = [part["path"] for part in table_parts(name)]
    problems: list[Problem] = []
    total = sum(os.path.getsize(file) for file in files if os.path.exists(file))
    rows = done = 0
    for file in files:
        file_problems: list[Problem] = []
        zones = _check_bytes(file, file_problems, is_folder)
        rows += 0 if zones is None else zones.rows
        if not file_problems:
            try:
                with Table(file, [ArrowFile(file)], {}) as table:
                    rows += table.rows if zones is None else 0
                    _check_rows(table, zones, file_problems)
            except WarpwellError as error:
                if not is_folder and zones is None:
                    raise
                file_problems.append(Problem(file, None, str(error)))
        problems += file_problems[:_MAX_PROBLEMS]
        done += os.path.getsize(file) if os.path.exists(file) else 0
        report("verify", done, total)
    return TableCheck(rows, done, problems)


def _check_bytes(path: str, problems: list[Problem], is_folder: bool) -> Zones | None:
    """Compare a file with the checksums of its zones, and return the zones, or None if they are missing."""
    try:
        zones = load_zones(path)
    except FileNotFoundError:
        if is_folder:
            problems.append(Problem(path + SUFFIX, None, "is missing: the file cannot be compared with its checksums"))
        return None
    except FormatError as error:
        problems.append(Problem(path + SUFFIX, None, str(error)))
        return None
    try:
        size, checksums = os.path.getsize(path), file_checksums(path)
    except OSError as error:
        problems.append(Problem(path, None, f"cannot be read: {error.strerror or error}"))
        return zones
    if size != zones.nbytes:
        problems.append(Problem(path, min(size, zones.nbytes), f"has {size} bytes, and {zones.nbytes} were written"))
        return zones
    for k, (checksum, written) in enumerate(zip(checksums, zones.checksums, strict=True)):
        if checksum != written:
            problems.append(Problem(path, k * CHECKED_BYTES, "the MiB from here differs from its checksum"))
    return zones


def _check_rows(table: Table, zones: Zones | None, problems: list[Problem]) -> None:
    """Follow offsets and codes, read text, count nulls, and compute the zones again."""
    for name, number in zip(table.names, range(len(table.names)), strict=True):
        for run in table[number].runs:
            try:
                for first in range(0, run.rows, _ROWS):
                    run.arrow(first, min(_ROWS, run.rows - first))
            except (FormatError, MediumError) as error:
                problems.append(Problem(table.path, None, str(error)))
                continue
            nulls = 0 if run.valid is None else run.rows - _count_valid(run)
            if nulls != run.nulls and run.dictionary is None and run.layout.kind not in ("null", "nested"):
                text = f"column {name!r}: {nulls} rows from row {run.first} are null, and {run.nulls} should be"
                problems.append(Problem(table.path, None, text))
    if zones is not None and not problems and not zones.equals(compute_zones(*zone_columns(table))):
        problems.append(Problem(table.path + SUFFIX, None, "differs from the rows: run ww.table.index again"))


def _count_valid(run: ColumnRun) -> int:
    """Return the number of valid rows."""
    assert run.valid is not None
    return int(np.unpackbits(run.valid.numpy(), bitorder="little", count=run.rows).sum())
