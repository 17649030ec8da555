"""pyarrow, `pa.ipc` and `pa.compute`, imported when an attribute is first used: ``from . import arrow as pa``."""

from __future__ import annotations

from typing import Any

from .._check import imported


def __getattr__(name: str) -> Any:
    """Return an attribute of pyarrow.

    Raises
    ------
    ArgumentError
        pyarrow is not installed.
    """
    if name.startswith("__"):
        raise AttributeError(name)
    for module in ("pyarrow.ipc", "pyarrow.compute"):
        imported(module, "table")
    return globals().setdefault(name, getattr(imported("pyarrow", "table"), name))
