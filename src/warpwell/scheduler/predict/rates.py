"""Rates: how fast kernels run together, as their normalized IPC (ipc_shared / ipc_alone).

All models take the order of residency into account: the hardware behaves as if the oldest resident warps issue first,
so a memory-intensive kernel that was launched before a compute-intensive one keeps its rate, and one launched after it
starves. An executor, a log and an output name the model that they used.
"""

from __future__ import annotations

import os

from ... import errors
from ..executor import Capacity
from .class_table import ClassTable
from .matrix import Matrix, Pair
from .max_min import MaxMin
from .rate_model import RateModel

__all__ = ["ClassTable", "Matrix", "MaxMin", "Pair", "RateModel", "rates"]

NAMES = ("class", "maxmin", "matrix")


def rates(name: str, capacity: Capacity | None = None, *, matrix: str | os.PathLike[str] | None = None) -> RateModel:
    """Return a model by its name.

    Parameters
    ----------
    name : {"class", "maxmin", "matrix"}
    capacity : Capacity, optional
    matrix : path, optional
        File of measured pairs, for "matrix"; what it lacks has the rates of the class table.

    Raises
    ------
    ArgumentError
        Another name, or no file where one is needed.
    """
    if name not in NAMES:
        raise errors.ArgumentError(f"no rates {name!r}: take one of {', '.join(NAMES)}", name="rates")
    if (name == "matrix") != (matrix is not None):
        what = "needs a file of measured pairs" if matrix is None else f"has no use for the matrix {matrix}"
        raise errors.ArgumentError(f"rates {name!r} {what}: give both, or neither", name="matrix")
    if matrix is not None:
        return Matrix.read(matrix, ClassTable(capacity))
    return MaxMin(capacity) if name == "maxmin" else ClassTable(capacity)
