"""`RemoteArray`: an array on storage that a device of the pool has opened, as the application sees it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..array.array import Array
from ..array.on_storage import OnStorage
from ..cache import Statistics
from ..pool.device import Device
from ..targets.arrays import to_host
from .stand_in import RemoteResource


class RemoteArray(OnStorage, RemoteResource):
    """An `Array` on a device; ``device.open(path)`` makes it.

    Kernels of the device take it as an argument and read and write it where the device is: its data never come through
    the application, but for what is asked of the array here, ``a[3]``, ``a[10:20]``, ``a[rows]``. Methods wait for what
    was launched before in the device's default stream, and raise what failed there or in the agent as `RemoteError`.

    A context manager, which closes the array. One that is dropped without is written and released on the device
    soon after, as with `Array`.

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
        """Return one field of a record array as an array of its own; it shares cache and file."""
        return self.device.create("array part", self, "field", name)  # type: ignore[no-any-return]

    def reshape(self, *shape: Any) -> RemoteArray:
        """Return the same data in another shape (C order); it shares cache and file."""
        return self.device.create("array part", self, "reshape", *shape)  # type: ignore[no-any-return]

    # -- residency ---------------------------------------------------------------------------------------------

    def prefetch(self, start: int | None = None, stop: int | None = None) -> None:
        """See `Array.prefetch`."""
        self.call("prefetch", start, stop).get()

    def pin(self, start: int | None = None, stop: int | None = None) -> None:
        """See `Array.pin`."""
        self.call("pin", start, stop).get()

    def unpin(self, start: int | None = None, stop: int | None = None) -> None:
        """See `Array.unpin`."""
        self.call("unpin", start, stop).get()

    def evict(self, start: int | None = None, stop: int | None = None) -> None:
        """See `Array.evict`."""
        self.call("evict", start, stop).get()

    # -- life --------------------------------------------------------------------------------------------------

    @property
    def stats(self) -> Statistics:
        """Statistics of the array's cache on the device."""
        return self.attribute("stats")  # type: ignore[no-any-return]

    def flush(self) -> None:
        """Write what was changed to storage and make it durable; see `Array.flush`."""
        self.call("flush").get()

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
