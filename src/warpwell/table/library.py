"""`arrow` and `polars`: pyarrow and Polars, imported when they are first needed."""

from __future__ import annotations

import importlib
from typing import Any

from .._check import extra
from ..errors import ArgumentError

_loaded: list[Any] = []


def arrow() -> Any:
    """Return pyarrow.

    Raises
    ------
    ArgumentError
        It is not installed.
    """
    if not _loaded:
        for part in ("ipc", "compute"):
            _import(f"pyarrow.{part}")
        _loaded.append(_import("pyarrow"))
    return _loaded[0]


def polars() -> Any:
    """Return Polars.

    Raises
    ------
    ArgumentError
        It is not installed.
    """
    return _import("polars")


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ArgumentError(f"this needs {name.split('.')[0]}: install {extra('table')}") from error
