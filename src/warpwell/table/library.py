"""`polars`: Polars, imported when it is first needed. Columns in schemas of pyarrow."""

from __future__ import annotations

import logging
import re
from typing import Any

from .._check import checked_integer, imported
from ..errors import ArgumentError, DTypeError
from . import arrow as pa

_log = logging.getLogger(__package__)


def polars() -> Any:
    """Return Polars; raise ArgumentError if it is not installed."""
    return imported("polars", "table")


def to_polars(table: Any) -> Any:
    """Return a `pyarrow.Table` as a `polars.DataFrame`, without a copy if Polars can use Arrow's buffers.

    Raises
    ------
    DTypeError
        Polars does not have a column's type.
    """
    library = polars()
    try:
        if any(pa.types.is_interval(kind) or pa.types.is_decimal256(kind) for kind in table.schema.types):
            raise TypeError("it has no intervals and no decimals of 256 bits")  # it would panic, and print the stack
        return library.from_arrow(table, rechunk=False)
    except BaseException as error:  # a panic of Polars is not an Exception
        if isinstance(error, KeyboardInterrupt | MemoryError | SystemExit):
            raise
        raise DTypeError(f"Polars cannot have these columns ({line_of(error)}): omit them, or use arrow()") from None


def column_number(schema: Any, name: str | int, owner: str) -> int:
    """Return the number of the column with a name or number.

    Raises
    ------
    ArgumentError
        The owner of the schema has no such column, or several.
    """
    if not isinstance(name, str):
        return checked_integer(name, "the number of a column", minimum=0, maximum=len(schema) - 1)
    numbers = schema.get_all_field_indices(name)
    if len(numbers) == 1:
        return int(numbers[0])
    if numbers:
        problem = f"{len(numbers)} columns {name!r}, of numbers {numbers}: take one by its number, or rename one"
    else:
        names = ", ".join(map(repr, schema.names[:20])) + (", ..." if len(schema.names) > 20 else "")
        problem = f"no column {name!r:.60}: it has {names}"
    raise ArgumentError(f"{owner} has {problem}", name="columns")


def line_of(error: BaseException) -> str:
    """Return the first line of a message, because pyarrow appends a position in its source code."""
    return str(error).split("\n")[0][:200]


def readable_columns(schema: Any, source: str) -> list[int]:
    """Return the numbers of the columns whose types pyarrow has in Python; the log names the others.

    Intervals of months, and of days and times, are types of Arrow, but not of pyarrow.
    """
    readable, left_out = [], []
    for number, name in enumerate(schema.names):
        is_unknown = re.search(r"\b(month|day_time)_interval", str(schema.field(number).type))
        if is_unknown:
            left_out.append(repr(name))
        else:
            readable.append(number)
    if left_out and not readable:
        raise DTypeError(f"{source}: pyarrow does not have the types of its columns {', '.join(left_out)}: cast them")
    if left_out:
        _log.warning(
            "%s: columns are left out because pyarrow does not have their types: %s", source, ", ".join(left_out)
        )
    return readable
