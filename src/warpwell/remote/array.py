"""`RemoteArray`: an array on storage that a device of the pool has opened, as the application sees it."""

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
    """An `Array` on a device; ``device.open(path)`` makes it.

    Kernels of the device take it as an argument, and read and write it on the device's host. Only items that the
    application itself subscripts travel to it: ``a[3]``, ``a[10:20]``, ``a[rows]``. Methods wait for the launches
    before them in the device's default stream, and raise their failures and the agent's as `RemoteError`.

    A context manager, which closes the array. An array that is never closed is written and released on the device when
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
        about = self.opened(_about)
        self.shape: tuple[int, ...] = about["shape"]
        self.dtype: np.dtype[Any] = about["dtype"]
        self.name: str = about["name"]
        self.tier: str = about["tier"]
        self.writable: bool = about["writable"]

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

    # -- life --------------------------------------------------------------------------------------------------

    @property
    def stats(self) -> Statistics:
        """Statistics of the array's cache on the device."""
        return self.attribute("stats")  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        state = "closed " if self.closed else ""
        return f"<{state}RemoteArray {self.name!r} {self.shape} {self.dtype} on device {self.device.index}>"


# -- on the agent ----------------------------------------------------------------------------------------------------


def part(array: Array, method: str, *args: Any) -> Array:
    """Return a field, or another shape, of an array."""
    return getattr(array, method)(*args)  # type: ignore[no-any-return]


def _about(array: Array) -> dict[str, Any]:
    return {name: getattr(array, name) for name in ("shape", "dtype", "name", "tier", "writable")}


def _get(array: Array, index: Any) -> Any:
    return to_host(array[index])


def _put(array: Array, index: Any, value: NDArray[Any]) -> None:
    array[index] = value
