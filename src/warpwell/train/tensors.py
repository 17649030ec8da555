"""NumPy arrays as tensors of PyTorch, without a copy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import errors
from .._check import extra
from ..array import DeviceArray, is_bits
from .dataset import Records


def collate(batch: Any) -> dict[str, Any]:
    """Return records as tensors, one a field, in the records' memory: the ``collate_fn`` of PyTorch's ``DataLoader``.

    Parameters
    ----------
    batch : Records
        From `Dataset`.

    Returns
    -------
    dict of torch.Tensor

    Raises
    ------
    ArgumentError
        It is of another data set, or PyTorch is not installed.
    """
    if not isinstance(batch, Records):
        raise errors.ArgumentError(
            f"collate was given a {type(batch).__name__}: it is for warpwell.train.Dataset alone", name="collate_fn"
        )
    return {name: tensor_of(rows, batch.dtypes[name]) for name, rows in batch.fields.items()}


def tensor_of(rows: NDArray[Any] | DeviceArray, dtype: np.dtype[Any]) -> Any:
    """Return a tensor over the memory of rows of an array of a dtype, bfloat16 too; in a GPU's memory if they are."""
    with needs("torch"):
        import torch  # slow, and an extra
    if isinstance(rows, DeviceArray):
        return torch.from_dlpack(rows)
    if is_bits(dtype) or dtype.name == "bfloat16":
        return torch.from_numpy(rows.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(rows)


@contextlib.contextmanager
def needs(name: str) -> Iterator[None]:
    """Return a context in which libraries are imported that training may need.

    Raises
    ------
    ArgumentError
        It is not installed.
    """
    try:
        yield
    except ImportError as error:
        raise errors.ArgumentError(f"this needs {name}: install {extra('train')}") from error
