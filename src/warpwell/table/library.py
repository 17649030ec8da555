"""`arrow` and `polars`: pyarrow and Polars, imported when they are first needed."""

from __future__ import annotations

import importlib
import logging
import re
from typing import Any

from .._check import extra
from ..errors import ArgumentError, DTypeError

_loaded: list[Any] = []
_log = logging.getLogger(__package__)


def arrow() -> Any:
    """Return pyarrow.

    Raises
    ------
    ArgumentError
        It is not installed.
    """
    if not _loaded:
        for part in ("ipc", "compute"):
            imported(f"pyarrow.{part}")
        _loaded.append(imported("pyarrow"))
    return _loaded[0]


def polars() -> Any:
    """Return Polars.

    Raises
    ------
    ArgumentError
        It is not installed.
    """
    return imported("polars")


def imported(name: str) -> Any:
    """Return a module of another library.

    Raises
    ------
    ArgumentError
        It is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.split(".")[0]
        source = extra("table") if package in ("pyarrow", "polars") else f"it (pip install {package})"
        raise ArgumentError(f"this needs the package {package}: install {source}") from error


def line_of(error: BaseException) -> str:
    """Return the first line of a message, for pyarrow appends where in its source it arose."""
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
