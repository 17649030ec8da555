"""NumPy arrays as tensors of PyTorch, without a copy."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import errors
from .._check import extra
from ..array import DeviceArray, is_bits


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
