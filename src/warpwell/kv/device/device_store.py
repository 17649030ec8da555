"""DeviceStore: a store whose records kernels fetch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import errors
from ...storage import NativeMedium
from ...targets import LaunchFlag
from .. import lifetime
from ..keys import Keys, as_keys
from ..ragged import Ragged
from ..records import Records
from ..store import HostFuture, Store
from . import requests as at
from .engine import DeviceOptions, Engine
from .gather import BatchSpaces, GatheredBatch
from .kernel_view import KernelStore
from .upload import keys_from_gpu, upload

MakeMedium = Callable[[NativeMedium], Any]


class DeviceStore(Store):
    """A `Store` on a device: `get_async` reads to the device, and kernels receive the store as an argument.

    Use `warpwell.kv.open` with ``device=``. The host can use it like every `Store`. A store that is open for writing
    has no device cache, because the host may change records.

    Attributes
    ----------
    device : str
        "cpu", "cuda" or "interp".
    options : DeviceOptions
    """

    def __init__(
        self,
        records: Records,
        *,
        options: DeviceOptions,
        beside: DeviceStore | None = None,
        drive: MakeMedium | None = None,
    ) -> None:
        super().__init__(records)
        if self.writable:
            options = replace(options, cache=0)
        if self.schema is not None and not self.schema.ragged:
            options = replace(options, value_bytes=self.schema.nbytes)
        self.options = options
        self._controller_store = beside
        self._engine: Engine
        try:
            host = None if beside is None else beside._engine
            natives = records.natives() if host is None else host.natives
            self._drives = [drive(native) for native in natives] if drive is not None and host is None else []
            served = [d.native() for d in self._drives] or natives
            self._engine = Engine(served, options, name=self.path, host=host)
        except BaseException:
            super()._close(commit=False)
            raise
        lifetime.on_device(self._estate, self._engine, beside)
        self._spaces = BatchSpaces()
        self._view = KernelStore(self.schema, {"core": self._engine.core})
        self.device = self._engine.target
        self._failures_before: dict[LaunchFlag, int] = {}  # by launch in flight

    def get_async(self, keys: Any, *, fields: Sequence[str] | None = None) -> Any:
        """Start to read the values of many keys in threads of the host; return a future with a method ``wait()``.

        Arguments and result are those of `get_many`; keys may also be int64 [N] in GPU memory. On a GPU, the arrays of
        the result are in GPU memory. There, a ragged field is a pair of arrays, `RaggedArrays`, and so are the values
        of a store without a schema; an absent key then has an empty value.
        """
        self.check_open()
        if hasattr(keys, "__cuda_array_interface__"):
            keys = keys_from_gpu(self._engine, keys)
        if self.device != "cuda":
            return super().get_async(keys, fields=fields)
        names = None if fields is None else self._checked_fields(fields)
        if self.schema is not None and not self.schema.ragged:
            return GatheredBatch(self, self._spaces, keys, names)
        checked = as_keys(keys).copied()
        return HostFuture(lambda: upload(self._engine, *self._ragged(checked, names)))

    def _ragged(self, keys: Keys, names: Sequence[str] | None) -> tuple[dict[str, Any] | Ragged, NDArray[np.bool_]]:
        """Return a batch of records with ragged fields, or of values without a schema, and a mask."""
        if self.schema is not None:
            return self.get_many(keys, fields=names)
        read = self._reading(self._records.buffer, keys)
        return Ragged.of_pieces(read.buffer, read.starts, read.sizes, (), bytes), read.found

    @property
    def device_stats(self) -> dict[str, int]:
        """Return the size of a piece of a value, and counters of the device: values from its cache, commands."""
        self.check_open()
        hits, commands = self._engine.read_words(at.K_COUNTERS, 2)
        return {
            "hits": hits,
            "commands": commands,
            "cache_records": self._engine.cache_records,
            "piece_bytes": self._engine.chunk,
            "staging_bytes": self._engine.shared_nbytes,
        }

    def refresh(self) -> int:
        """Read what another process committed since the last refresh, as `Store.refresh` does.

        If there is a device cache, this waits for launches in flight and empties the cache.
        """
        if self._engine.forked:
            return super().refresh()  # in a forked child, the device belongs to the parent
        if self._controller_store is not None:
            self._controller_store.refresh()  # the device reads the index of that store
            return super().refresh()
        if self.writable:
            return super().refresh()
        caches = [e for e in (self._engine, *self._engine.guests) if e.cache_records]
        with contextlib.ExitStack() as alone:
            # a value that was read before the refresh must not enter a cache after the refresh
            for engine in caches:
                alone.enter_context(engine.alone())
            changes = super().refresh()
            if changes:
                for engine in caches:
                    engine.forget()
        return changes

    @property
    def is_bound_to_process(self) -> bool:
        """Whether the store cannot be pickled, because another process cannot open it in the same way."""
        return self.device == "cuda" or self._controller_store is not None or bool(self._drives)

    def _close(self, *, commit: bool) -> None:
        if self.closed:
            return
        try:
            self._engine.close()
        except errors.SharingError:  # possibly batches of an iterator that was just dropped
            lifetime.wait_until_closed()
            self._engine.close()
        super()._close(commit=commit)

    # -- an argument of kernels (`warpwell.targets.KernelArgument`) -----------------------------------------------

    def kernel_struct(self, flag: LaunchFlag | None = None) -> KernelStore:
        """Return the struct that kernels receive."""
        self.check_open()
        return self._view

    def launch_begins(self, flag: LaunchFlag) -> None:
        """Register the start of a launch with this store."""
        self._engine.begin()
        self._failures_before.setdefault(flag, self._engine.failures)

    def launch_ended(self, flag: LaunchFlag) -> None:
        """Register the end of a launch; raise if one of its commands failed or timed out."""
        failures = self._failures_before.pop(flag, self._engine.failures)
        self._engine.end()
        self._engine.raise_since(failures)

    def launch_continues(self, flag: LaunchFlag, done: Callable[[], bool]) -> None:
        """Serve a launch that continues in a stream until `done` returns True; a later launch raises its errors."""
        self._failures_before.pop(flag, None)
        self._engine.continues(done)

    def interp_services(self) -> list[Callable[[], int]]:
        """Return the functions that an interpreted launch calls between the steps of its threads."""
        return self._engine.services()

    def abort(self, flag: LaunchFlag) -> None:
        """Make every wait of device code end soon."""
        self._engine.abort()
