"""Batches that the host reads with `get_many` and copies to a GPU; keys in GPU memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ... import errors
from ...array import DeviceArray
from ..ragged import Ragged
from .engine import Engine


class RaggedArrays(NamedTuple):
    """A ragged field, or values without a schema, in GPU memory.

    Attributes
    ----------
    values : DeviceArray
        [total, ...]: the items one after the other.
    offsets : DeviceArray
        int64 [N + 1]: item i is ``values[offsets[i]:offsets[i + 1]]``.
    """

    values: DeviceArray
    offsets: DeviceArray


def upload(engine: Engine, batch: dict[str, Any] | Ragged, found: NDArray[np.bool_]) -> tuple[Any, DeviceArray]:
    """Return a batch with arrays in the memory of an engine's GPU (any thread)."""
    engine.check()

    def copied(array: Any) -> Any:
        if isinstance(array, Ragged):
            return RaggedArrays(copied(array.values), copied(array.offsets))
        block = engine.memory.allocate(max(1, array.nbytes))
        block.write(0, array)
        return DeviceArray(block._owner, array.shape, array.dtype)

    with engine.stream.on_device():
        if isinstance(batch, Ragged):
            return copied(batch), copied(found)
        return {name: copied(field) for name, field in batch.items()}, copied(found)


def keys_from_gpu(engine: Engine, keys: Any) -> NDArray[np.int64]:
    """Return keys in GPU memory as an array of the host."""
    if engine.target != "cuda":
        raise errors.ArgumentError(
            f'keys are in GPU memory, and this store is on "{engine.target}": copy them to the host, or open it with'
            ' device="cuda"',
            name="keys",
        )
    interface: dict[str, Any] = keys.__cuda_array_interface__
    is_contiguous = interface.get("strides") in (None, (8,))
    if len(interface["shape"]) != 1 or np.dtype(interface["typestr"]) != np.int64 or not is_contiguous:
        raise errors.ArgumentError(
            f"keys in GPU memory must be a contiguous int64 array of shape [N], got {interface['typestr']} "
            f"{interface['shape']}, strides {interface.get('strides')}: convert them, or pass them from the host",
            name="keys",
        )
    nbytes = 8 * int(interface["shape"][0])
    block = engine.memory.allocate_shared(max(8, nbytes))
    engine.stream.after_default(interface.get("stream"))
    engine.stream.copy(block.address, int(interface["data"][0]), nbytes)
    engine.stream.wait()
    return block.words[: nbytes // 8].copy()
