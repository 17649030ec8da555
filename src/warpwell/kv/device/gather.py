"""GatheredBatch: a batch whose values host threads read into pinned memory, from which the GPU copies them.

The batch's stream waits for the count of pieces that were read, and then copies, so no Python code runs between. GPU
threads take no part: a kernel that computes at the same time is not slowed down. Kernels use the queues instead,
because they know their keys only while they run, and so do stores with a device cache.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ... import errors
from ..._os import clock, uninterrupted
from ..index.index import addresses
from ..keys import as_keys
from ..native import compiled
from ..records import Records
from ..schema import Schema
from .engine import Engine
from .future import BatchSpaces, Lease, fields_of
from .piece_readers import PieceReaders, piece_readers, read_pieces, wait_for_pieces

PIECE_KEYS = 256
"""Minimum of keys of a piece: a smaller piece costs more time than it saves."""
MAX_PIECES = 32
DONE_BYTES = 256
"""At the begin of a space: pieces that were read, and keys that could not be read."""


class GatherSpace:
    """Memory of one batch in device memory and in pinned memory, with the same layout.

    Attributes
    ----------
    found_at, rows_at : int
        Offset of a byte for each key, 1 if it was found, and offset of the rows.
    """

    found_at = DONE_BYTES

    def __init__(self, engine: Engine, capacity: int, stride: int) -> None:
        self.capacity, self.stride = capacity, stride
        self.rows_at = self.found_at + -(-capacity // 256) * 256
        self.nbytes = self.rows_at + capacity * stride
        self.used = False
        self.device = engine.memory.allocate(self.nbytes)
        self.host = engine.memory.allocate_shared(self.nbytes)


class GatheredBatch:
    """A batch in flight; ``wait()`` returns the same result as `Store.get_many`, in device memory.

    See `DeviceFuture` about the memory of its arrays.

    Parameters
    ----------
    engine : Engine
    spaces : BatchSpaces
    records : Records
    keys : array or iterable
        As for `Store.get_many`.
    schema : Schema
    names : sequence of str or None
        The fields to return, by default all.
    """

    def __init__(
        self,
        engine: Engine,
        spaces: BatchSpaces,
        records: Records,
        keys: Any,
        schema: Schema,
        names: Sequence[str] | None,
    ) -> None:
        engine.check()
        engine.reap()
        self._keys = as_keys(keys).copied()
        self.count = n = self._keys.size
        self._engine, self._records, self._schema, self._names = engine, records, schema, names
        self._result: Any = None
        self._pid = os.getpid()
        self._lease = Lease(spaces, spaces.take(engine, max(1, n), schema.nbytes, GatherSpace))
        space, stream = self._lease.space, engine.stream
        base = space.host.address
        space.host.words[:2] = 0
        self._locations = np.empty((n, 2), np.int64)
        self._pieces = max(1, min(MAX_PIECES, n // PIECE_KEYS))
        arguments = [
            n,
            records.state.address,
            *addresses(self._keys),
            self._locations.ctypes.data,
            base + space.rows_at,
            space.stride,
            base + space.found_at,
            base,
        ]
        self._readers: PieceReaders = piece_readers()
        self._is_copied: Callable[[], bool] = lambda: True
        with uninterrupted():  # `engine.gathered` keeps the memory that the threads use
            self._slot = self._readers.start(self._pieces, arguments)
            while self._slot < 0:  # more batches are in flight than there are places
                engine.gathered[0].settle()
                self._slot = self._readers.start(self._pieces, arguments)
            engine.gathered.append(self)
        if space.used:
            # a kernel may still be reading the arrays of the batch before
            stream.after_default()
        space.used = True
        stream.wait_for_word(base, self._pieces)
        self._copy()

    def _copy(self) -> None:
        space = self._lease.space
        nbytes = space.rows_at - space.found_at + self.count * space.stride
        stream = self._engine.stream
        stream.copy(space.device.address + space.found_at, space.host.address + space.found_at, nbytes)
        self._is_copied = stream.mark()

    def done(self) -> bool:
        """Return whether all values have arrived, so that `wait` returns at once."""
        return self._slot < 0 or self._pid != os.getpid() or (self._all_read(0) and self._is_copied())

    def _all_read(self, nanoseconds: int) -> bool:
        return bool(compiled(wait_for_pieces)(self._lease.space.host.address, self._pieces, nanoseconds))

    def wait(self) -> tuple[Any, Any]:
        """Wait for the values and return them (may be called again).

        Returns
        -------
        batch : dict of arrays
            Fields [N, ...] of the schema, on the device (zeros for absent keys).
        found : array
            bool [N], on the device.

        Raises
        ------
        CorruptionError, MediumError
            A value cannot be read, or its checksum is wrong.
        ForkError
            Another process, from which this one was forked, started the batch.
        """
        self.settle()
        if self._result is None:
            space = self._lease.space
            if space.host.words[1]:
                # This raises the error. If nothing is wrong any more, all is well.
                rows = space.host.view(np.dtype(np.uint8))[space.rows_at :][: self.count * space.stride]
                _, found = self._records.rows(self._keys, space.stride, rows.reshape(self.count, space.stride))
                space.host.view(np.dtype(np.uint8))[space.found_at :][: self.count] = found
                self._copy()
                self._engine.stream.wait()
                space.host.words[1] = 0
            self._result = fields_of(self._lease, self._schema, self.count, self._names)
        return self._result  # type: ignore[no-any-return]

    def settle(self) -> None:
        """Wait until the batch has ended; `wait` raises its errors."""
        if self._pid != os.getpid():
            raise errors.ForkError(
                f"this batch was started in process {self._pid}, which this one ({os.getpid()}) was forked from: start"
                " it again here"
            )
        if self._slot >= 0:
            compiled(read_pieces)(self._readers.address_of(self._slot))
        while not self._all_read(10**7):
            pass
        spins = 0
        while not self._is_copied():
            spins += 1
            if spins > 100:
                clock.sleep(5e-5)
        self._engine.forget_gathered(self)

    def retire(self) -> None:
        """Give the place of the job back (once, by `Engine.forget_gathered`)."""
        slot, self._slot = self._slot, -1
        self._readers.give_back(slot)
