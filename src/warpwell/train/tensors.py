"""Columns of records that a function has decoded, and columns as tensors of PyTorch."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import numpy as np

from .. import errors
from .._check import extra
from ..array import DeviceArray, is_bits
from ..kv import Ragged


def tensors_of(rows: Any, dtype: np.dtype[Any] | None) -> Any:
    """Return a column as tensors that share its memory, on its device.

    Parameters
    ----------
    rows : ndarray, DeviceArray, torch.Tensor, Ragged or list
    dtype : numpy.dtype, optional
        The dtype of the array on storage, if it is not that of `rows`.

    Returns
    -------
    torch.Tensor or list
        A list has tensors for arrays; its other items stay as they are. A `Ragged` becomes such a list.
    """
    if isinstance(rows, list | Ragged):
        return [tensors_of(row, None) if isinstance(row, np.ndarray) else row for row in rows]
    torch = import_torch("torch")
    if isinstance(rows, torch.Tensor):
        return rows
    if isinstance(rows, DeviceArray):
        return torch.from_dlpack(rows)
    dtype = dtype or rows.dtype
    if is_bits(dtype) or dtype.name == "bfloat16":
        return torch.from_numpy(rows.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(rows)


def column_of(values: list[Any]) -> Any:
    """Return the values of one field: stacked if they are arrays, numbers or tensors of one shape, else as a list."""
    torch = sys.modules.get("torch")
    stack: Any = np.stack
    if torch is not None and all(isinstance(value, torch.Tensor) for value in values):
        stack = torch.stack
    elif all(isinstance(value, np.ndarray | np.generic | int | float | complex) for value in values):
        values = [np.asarray(value) for value in values]
    else:
        return values
    return stack(values) if len({value.shape for value in values}) == 1 else values


def import_torch(name: str) -> Any:
    """Return a module of PyTorch or PyTorch Geometric, which take seconds to import.

    Raises
    ------
    ArgumentError
        It is not installed, or a shared library of it cannot be loaded.
    """
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:
        raise errors.ArgumentError(f"this needs {name.partition('.')[0]}: install {extra('train')}") from error
