"""`RemoteStore`: a key-value store that a device of the pool has opened, as the application sees it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import errors
from ..kv.keys import as_key, shown
from ..kv.schema import Schema
from ..kv.store import Store, StoreStatistics
from ..pool.device import Device
from .stand_in import RemoteResource


class RemoteStore(RemoteResource):
    """A `DeviceStore` on a device; ``device.open_store(path)`` makes it.

    Kernels of the device take it as an argument and fetch records where the device is. Methods here do what those of
    `Store` do, there; they wait for what was launched before in the device's default stream.

    A context manager: it commits and closes; after an exception it closes without a commit.

    Attributes
    ----------
    device : Device
    name : str
        Its folder.
    schema : Schema or None
    writable : bool
    """

    def __init__(self, device: Device, handle: int, path: str) -> None:
        super().__init__(device, handle, path)
        about: tuple[str, Schema | None, bool] = self.opened(_about)
        self.name, self.schema, self.writable = about

    # -- records -----------------------------------------------------------------------------------------------

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the value of a key; see `Store.get`."""
        found, value = self.device.call(_get, self, key).get()
        return value if found else default

    def put(self, key: Any, value: Any) -> None:
        """Store one record; see `Store.put`."""
        self.call("put", key, value).get()

    __setitem__ = put

    def delete(self, key: Any) -> bool:
        """Delete a record; return whether it was there."""
        return bool(self.call("delete", key).get())

    def get_many(self, keys: Any) -> tuple[Any, NDArray[np.bool_]]:
        """Return the values of many keys, and which were found; see `Store.get_many`."""
        return self.call("get_many", keys).get()  # type: ignore[no-any-return]

    def put_many(self, keys: Any, values: Any) -> None:
        """Store many records; see `Store.put_many`."""
        self.call("put_many", keys, values).get()

    def delete_many(self, keys: Any) -> int:
        """Delete many records; return how many were there."""
        return int(self.call("delete_many", keys).get())

    def list(self, prefix: bytes | str = b"", start: Any = None, limit: int | None = None) -> list[int | bytes]:
        """Return keys in order; see `Store.list`."""
        return self.call("list", prefix, start, limit).get()  # type: ignore[no-any-return]

    def __getitem__(self, key: Any) -> Any:
        found, value = self.device.call(_get, self, key).get()
        if not found:
            told = f"{self.name} on device {self.device.index} has no key {shown(key)!r}"
            raise errors.KeyMissingError(told, key=as_key(key))
        return value

    def __contains__(self, key: object) -> bool:
        return bool(self.call("__contains__", key).get())

    def __len__(self) -> int:
        return int(self.call("__len__").get())

    def __bool__(self) -> bool:
        return True  # not a question to the agent

    # -- the whole ---------------------------------------------------------------------------------------------

    def commit(self) -> int:
        """Make everything stored so far durable; see `Store.commit`."""
        return int(self.call("commit").get())

    def refresh(self) -> int:
        """Follow what another process committed since; see `Store.refresh`."""
        return int(self.call("refresh").get())

    @property
    def stats(self) -> StoreStatistics:
        """Figures of the store; see `Store.stats`."""
        return self.attribute("stats")  # type: ignore[no-any-return]

    @property
    def device_stats(self) -> dict[str, int]:
        """What the device did; see `DeviceStore.device_stats`."""
        return self.attribute("device_stats")  # type: ignore[no-any-return]

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._leave("_close", commit=False)

    def __repr__(self) -> str:
        state = "closed " if self.closed else ""
        return f"<{state}RemoteStore {self.name!r} on device {self.device.index}>"


# -- on the agent ----------------------------------------------------------------------------------------------------


def _about(store: Store) -> tuple[str, Schema | None, bool]:
    return str(store.path), store.schema, store.writable


def _get(store: Store, key: Any) -> tuple[bool, Any]:
    value = store.get(key, store)
    return (False, None) if value is store else (True, value)
