"""Columns of records that a function has decoded, and columns as tensors of PyTorch."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
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
        A `Ragged` and a list become a list, with tensors for arrays; other items stay as they are.
    """
    if isinstance(rows, Ragged) and rows.item_type is not np.ndarray:
        return rows.to_list()
    if isinstance(rows, list):
        return [tensors_of(row, None) if isinstance(row, np.ndarray) else row for row in rows]
    torch = import_torch("torch")
    if isinstance(rows, torch.Tensor):
        return rows
    if isinstance(rows, DeviceArray):
        return torch.from_dlpack(rows)
    dtype = dtype or rows.dtype
    if isinstance(rows, Ragged):
        return TensorList(map(torch.from_numpy, rows))
    if is_bits(dtype) or dtype.name == "bfloat16":
        return torch.from_numpy(rows.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(rows)


def set_default_collate(record_type: type, collate: Callable[[Any], Any]) -> None:
    """Make PyTorch's default ``collate_fn`` call `collate` for batches of a type of records, if PyTorch is imported."""
    module = sys.modules.get("torch.utils.data._utils.collate")
    if module is not None:
        module.default_collate_fn_map.setdefault(record_type, lambda batch, *, collate_fn_map=None: collate(batch))


class TensorList(list[Any]):
    """Tensors of different lengths, which a worker sends as one tensor: each tensor would take a file descriptor."""

    def __reduce__(self) -> Any:
        shapes = {(tensor.dtype, tensor.shape[1:]) if hasattr(tensor, "shape") else None for tensor in self}
        if len(shapes) != 1 or None in shapes:
            return list, (list(self),)
        return _split, (import_torch("torch").cat(list(self)), [len(tensor) for tensor in self])


def _split(values: Any, lengths: list[int]) -> TensorList:
    return TensorList(values.split(lengths))


def columns_of(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the fields of records as columns.

    Raises
    ------
    ArgumentError
        The records have different fields.
    """
    names = records[0].keys()
    for record in records:
        if record.keys() != names:
            raise errors.ArgumentError(
                f"a record of a batch has the fields {[*record]}, but the first has {[*names]}: return the same fields"
                " from decode= for each record",
                name="decode",
            )
    return {name: _column_of([record[name] for record in records]) for name in names}


def _column_of(values: list[Any]) -> Any:
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
        The package is not installed, or one of its shared libraries cannot be loaded.
    """
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:
        raise errors.ArgumentError(f"this needs {name.partition('.')[0]}: install {extra('train')}") from error
