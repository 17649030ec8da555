"""Copy a batch that the host has read to a GPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...array import DeviceArray
from ..ragged import Ragged
from .engine import Engine
from .future import checked_gpu_keys


class RaggedArrays(NamedTuple):
    """A ragged field in GPU memory.

    Attributes
    ----------
    values : DeviceArray
        [total, ...]: the items one after the other.
    offsets : DeviceArray
        int64 [N + 1]: item i is ``values[offsets[i]:offsets[i + 1]]``.
    """

    values: DeviceArray
    offsets: DeviceArray


def upload(engine: Engine, batch: dict[str, Any], found: NDArray[np.bool_]) -> tuple[dict[str, Any], DeviceArray]:
    """Return a batch of `Store.get_many` with arrays in the memory of an engine's GPU (any thread)."""
    engine.check()

    def copied(array: NDArray[Any]) -> DeviceArray:
        block = engine.memory.allocate(max(1, array.nbytes))
        block.write(0, array)
        return DeviceArray(block._owner, array.shape, array.dtype)

    with engine.stream.on_device():
        fields = {
            name: RaggedArrays(copied(field.values), copied(field.offsets))
            if isinstance(field, Ragged)
            else copied(field)
            for name, field in batch.items()
        }
        return fields, copied(found)


def copied_from_gpu(engine: Engine, keys: Any) -> NDArray[np.int64]:
    """Return keys in GPU memory as an array of the host."""
    interface = checked_gpu_keys(keys)
    nbytes = 8 * int(interface["shape"][0])
    block = engine.memory.allocate_shared(max(8, nbytes))
    engine.stream.after_default(interface.get("stream"))
    engine.stream.copy(block.address, int(interface["data"][0]), nbytes)
    engine.stream.wait()
    return block.words[: nbytes // 8].copy()
