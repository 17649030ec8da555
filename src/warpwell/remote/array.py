"""`RemoteArray`: the program's proxy for an array on storage that a device of the pool has opened."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..array import Array, OnStorage
from ..cache import Statistics
from ..pool import Device
from ..targets import to_host
from .stand_in import RemoteResource, forwarded


class RemoteArray(OnStorage, RemoteResource):
    """An `Array` on a device; ``device.open(path)`` creates one.

    Kernels of the device accept it as an argument, and read and write it on the device's host. Only items that the
    program itself reads or writes are sent over the network: ``a[3]``, ``a[10:20]``, ``a[rows]``. Methods wait for
    earlier launches in the device's default stream. They raise the failures of these launches, and their own, as
    `RemoteError`.

    A context manager that closes the array. An array that is never closed is flushed and released on the device when
    this object is garbage-collected, as with `Array`.

    Attributes
    ----------
    device : Device
    shape : tuple of int
    dtype : numpy.dtype
    name, tier : str
    writable : bool
    """

    def __init__(self, device: Device, handle: int, path: str) -> None:
        super().__init__(device, handle, path)
        self.shape: tuple[int, ...]
        self.dtype: np.dtype[Any]
        self.shape, self.dtype, self.name, self.tier, self.writable = self._wait_until_open(_describe)

    # -- items -------------------------------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):
            return self.field(index)
        return self.device.call(_get, self, index).get()

    def __setitem__(self, index: Any, value: Any) -> None:
        self.device.call(_put, self, index, np.asarray(value)).get()

    def field(self, name: str) -> RemoteArray:
        """Return one field of a record array as an array that shares its cache and file."""
        return self.device.create("array part", self, "field", name)  # type: ignore[no-any-return]

    def reshape(self, *shape: Any) -> RemoteArray:
        """Return an array of another shape (C order) that shares the data, cache and file."""
        return self.device.create("array part", self, "reshape", *shape)  # type: ignore[no-any-return]

    # -- residency ---------------------------------------------------------------------------------------------

    prefetch = forwarded(Array.prefetch)
    pin = forwarded(Array.pin)
    unpin = forwarded(Array.unpin)
    evict = forwarded(Array.evict)
    flush = forwarded(Array.flush)

    @property
    def stats(self) -> Statistics:
        """Statistics of the array's cache on the device."""
        return self.attribute("stats")  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        state = "closed " if self.closed else ""
        return f"<{state}RemoteArray {self.name!r} {self.shape} {self.dtype} on device {self.device.index}>"


# -- on the agent ----------------------------------------------------------------------------------------------------


def part(array: Array, method: str, *args: Any) -> Array:
    """Return a field of an array, or the array in another shape."""
    return getattr(array, method)(*args)  # type: ignore[no-any-return]


def _describe(array: Array) -> tuple[Any, ...]:
    return array.shape, array.dtype, array.name, array.tier, array.writable


def _get(array: Array, index: Any) -> Any:
    return to_host(array[index])


def _put(array: Array, index: Any, value: NDArray[Any]) -> None:
    array[index] = value
