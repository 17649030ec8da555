"""`RemoteStore`: the program's proxy for a key-value store that a device of the pool has opened."""

from __future__ import annotations

from typing import Any

from .. import errors
from ..kv import Schema, Store, StoreStatistics, as_key
from ..kv.keys import shown
from ..pool import Device
from .stand_in import RemoteResource, forwarded


class RemoteStore(RemoteResource):
    """A `DeviceStore` on a device; ``device.open_store(path)`` creates one.

    Kernels of the device accept it as an argument, and fetch records on the device's host. Each method waits for
    earlier launches in the device's default stream, then calls the method of `Store` on the agent.

    A context manager that commits and closes the store. After an exception it closes the store without a commit.

    Attributes
    ----------
    device : Device
    name : str
        Folder of the store.
    schema : Schema or None
    writable : bool
    """

    def __init__(self, device: Device, handle: int, path: str) -> None:
        super().__init__(device, handle, path)
        self.schema: Schema | None
        self.writable: bool
        self.name, self.schema, self.writable = self._wait_until_open(_describe)

    # -- records -----------------------------------------------------------------------------------------------

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the value of a key, or `default` if the store does not have the key."""
        found, value = self.device.call(_get, self, key).get()
        return value if found else default

    put = forwarded(Store.put)
    __setitem__ = put
    delete = forwarded(Store.delete)
    get_many = forwarded(Store.get_many)
    put_many = forwarded(Store.put_many)
    delete_many = forwarded(Store.delete_many)
    list = forwarded(Store.list)
    __contains__ = forwarded(Store.__contains__)
    __len__ = forwarded(Store.__len__)

    def __getitem__(self, key: Any) -> Any:
        value = self.get(key, self)
        if value is self:
            message = f"{self.name} on device {self.device.index} has no key {shown(key)!r}"
            raise errors.KeyMissingError(message, key=as_key(key))
        return value

    def __bool__(self) -> bool:
        return True  # without it, bool() would call __len__ on the agent

    commit = forwarded(Store.commit)
    refresh = forwarded(Store.refresh)

    @property
    def stats(self) -> StoreStatistics:
        """Statistics of the store."""
        return self.attribute("stats")  # type: ignore[no-any-return]

    @property
    def device_stats(self) -> dict[str, int]:
        """Counters of the requests that the device served."""
        return self.attribute("device_stats")  # type: ignore[no-any-return]

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._close_with("_close", commit=False)

    def __repr__(self) -> str:
        state = "closed " if self.closed else ""
        return f"<{state}RemoteStore {self.name!r} on device {self.device.index}>"


# -- on the agent ----------------------------------------------------------------------------------------------------


def _describe(store: Store) -> tuple[str, Schema | None, bool]:
    return str(store.path), store.schema, store.writable


def _get(store: Store, key: Any) -> tuple[bool, Any]:
    value = store.get(key, store)
    return (False, None) if value is store else (True, value)
