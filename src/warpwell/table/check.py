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
from .column import validate
from .library import line_of
from .table import Table, table_parts
from .zones import CHECKED_BYTES, SUFFIX, Zones, compute_zones, file_checksums, load_zones

_MAX_PROBLEMS = 10
"""Problems that are reported of one file."""


@dataclass(frozen=True)
class TableCheck:
    """The result of `check`.

    Attributes
    ----------
    rows : int
        In the files that agree with their checksums.
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
    is_folder = os.path.isdir(name)
    files = [part["path"] for part in table_parts(name)]
    sizes = [os.path.getsize(file) if os.path.exists(file) else 0 for file in files]
    problems: list[Problem] = []
    rows = done = 0
    for file, size in zip(files, sizes, strict=True):
        zones = None
        try:
            zones = load_zones(file)
        except (FileNotFoundError, FormatError) as error:
            if is_folder or isinstance(error, FormatError):
                problems.append(Problem(file + SUFFIX, None, f"cannot be compared with the rows: {line_of(error)}"))
        found = list(islice(_differences(file, size, zones), _MAX_PROBLEMS))
        if not found:
            try:
                with Table(file, [ArrowFile(file)], {}) as table:
                    found = list(islice(_damage(table, zones), _MAX_PROBLEMS))
                    rows += table.rows
            except WarpwellError as error:
                if not is_folder and zones is None:
                    raise
                found = [Problem(file, None, str(error))]
        problems += found
        done += size
        if progress is not None:
            progress("verify", done, sum(sizes))
    return TableCheck(rows, done, problems)


def _differences(path: str, size: int, zones: Zones | None) -> Iterator[Problem]:
    """Compare a file with the checksums of its zones."""
    if zones is None:
        return
    if size != zones.nbytes:
        yield Problem(path, min(size, zones.nbytes), f"has {size} bytes, and {zones.nbytes} were written")
        return
    for number, (checksum, written) in enumerate(zip(file_checksums(path), zones.checksums, strict=True)):
        if checksum != written:
            yield Problem(path, number * CHECKED_BYTES, "the MiB from here differs from its checksum")


def _damage(table: Table, zones: Zones | None) -> Iterator[Problem]:
    """Follow offsets and codes, read text, count nulls, and compute the zones again."""
    is_sound = True
    for number, name in enumerate(table.names):
        for run in table[number].runs:
            try:
                validate(run.array)
            except pa.ArrowException as error:
                is_sound = False
                yield Problem(table.path, None, f"column {name!r}, rows from {run.first}: {line_of(error)}")
    if is_sound and zones is not None and not zones.equals(compute_zones(table.schema, table.batches())):
        yield Problem(table.path + SUFFIX, None, "differs from the rows: run ww.table.index again")
