"""NumPy arrays as tensors of PyTorch, without a copy."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import errors
from .._check import extra
from ..array import DeviceArray, is_bits
from .dataset import Records


def collate(batch: Any) -> dict[str, Any]:
    """Return records as tensors that share their memory: the ``collate_fn`` of PyTorch's ``DataLoader``.

    Parameters
    ----------
    batch : Records
        From `Dataset`.

    Returns
    -------
    dict of torch.Tensor
        A tensor per field. Lists of bytes stay lists.

    Raises
    ------
    ArgumentError
        The batch is not from `Dataset`, or PyTorch is not installed.
    """
    if not isinstance(batch, Records):
        raise errors.ArgumentError(
            f"collate expects a batch of fields from warpwell.train.Dataset, got a {type(batch).__name__}: values of a"
            " store without a schema are bytes, which your own collate_fn decodes",
            name="collate_fn",
        )
    return {
        name: rows if isinstance(rows, list) else tensor_of(rows, batch.dtypes.get(name, np.dtype(np.int64)))
        for name, rows in batch.fields.items()
    }


def tensor_of(rows: NDArray[Any] | DeviceArray, dtype: np.dtype[Any]) -> Any:
    """Return a tensor that shares the memory of rows, on their device; `dtype` is the dtype of the array on storage."""
    torch = import_torch("torch")
    if isinstance(rows, DeviceArray):
        return torch.from_dlpack(rows)
    if is_bits(dtype) or dtype.name == "bfloat16":
        return torch.from_numpy(rows.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(rows)


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
