"""Writes: requests of kernels that need the log (store, delete, list, flush), served by one Python thread."""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .. import errors
from ..nvme import FLUSH, KV_DELETE, KV_LIST, KV_STORE, STORE_IF_EXISTS, STORE_IF_MISSING
from ..nvme.status import (
    CAPACITY_EXCEEDED,
    INTERNAL_ERROR,
    KV_INVALID_VALUE_SIZE,
    KV_KEY_DOES_NOT_EXIST,
    KV_KEY_EXISTS,
    NAMESPACE_NOT_READY,
    NAMESPACE_WRITE_PROTECTED,
    WRITE_FAULT,
)
from ..storage import NativeMedium
from ..targets import memory_for, view_of
from .index.index import WRITE_FUNCTIONS
from .index.layout import S_RING, StoreState, publish
from .index.serve import (
    CLOSING,
    E_BUFFER,
    E_KEY0,
    E_KEY1,
    E_NBYTES,
    E_OP,
    E_TAG,
    ENTRY_WORDS,
    Q_ENTRIES,
    Q_FLAGS,
    Q_HEAD,
    Q_SHIFT,
    RING_SHIFT,
    RING_WORDS,
    TAKES_CHANGES,
    answer,
    kv_complete,
    kv_start,
    taken,
    wait_for_requests,
)
from .keys import INT_KEY, Keys, from_bytes, in_byte_order, with_prefix
from .log.checksum import prepare_writes
from .native import compiled, prepare

_NAMES = {KV_STORE: "store", KV_DELETE: "delete", KV_LIST: "list", FLUSH: "flush"}
_ATTEMPTS = 400
_JOIN_SECONDS = 5.0


class _Records(Protocol):
    """The methods of a `Shard` that `Writes` calls."""

    lock: threading.RLock
    state: StoreState
    writable: bool

    def contains(self, keys: Keys) -> NDArray[np.bool_]: ...
    def entries(self) -> tuple[Keys, NDArray[np.int64]]: ...
    def put_one(self, key: bytes, value: Any, integer: bool = False) -> None: ...
    def delete(self, keys: Keys) -> NDArray[np.bool_]: ...
    def commit(self) -> int: ...


class Writes:
    """Serves the requests for one folder that native code cannot serve.

    Parameters
    ----------
    records : _Records
    value_bytes : int, optional
        Size that every value must have; None for any size.
    """

    def __init__(self, records: _Records, value_bytes: int | None = None) -> None:
        self._records = records
        self._value_bytes = value_bytes
        self._block = memory_for("cpu").allocate(8 * RING_WORDS)
        self._words = self._block.words
        self._words[Q_SHIFT] = RING_SHIFT
        self._words[Q_FLAGS] = TAKES_CHANGES if records.writable else 0
        self._entries = self._words[Q_ENTRIES : Q_ENTRIES + (ENTRY_WORDS << RING_SHIFT)].reshape(-1, ENTRY_WORDS)
        self.served: set[str] = set()
        """Kinds of requests that came."""
        self._thread = threading.Thread(target=self._work, name="warpwell-kv-writes", daemon=True)
        compiled(publish)(records.state.address, S_RING, self._block.address)
        prepare(wait_for_requests, answer, taken)
        if records.writable:
            prepare(*WRITE_FUNCTIONS)
            prepare_writes()
        self._thread.start()

    def native(self) -> NativeMedium:
        """Return the functions that a controller calls."""
        return NativeMedium(kv_start.address, kv_complete.address, self._records.state.address)

    def close(self) -> None:
        """Serve the requests in the ring, then stop; later requests fail with an error status."""
        if threading.current_thread() is not self._thread and self._thread.is_alive():
            self._words[Q_FLAGS] |= CLOSING
            self._thread.join(_JOIN_SECONDS)

    def _work(self) -> None:
        wait, post, take = compiled(wait_for_requests), compiled(answer), compiled(taken)
        ring = self._block.address
        while True:
            closing = bool(self._words[Q_FLAGS] & CLOSING)
            count = int(wait(ring, _ATTEMPTS))
            if count == 0:
                if closing:
                    return
                continue
            head = int(self._words[Q_HEAD])
            rows = self._entries[np.arange(head, head + count) & ((1 << RING_SHIFT) - 1)]
            for row in rows:
                post(ring, int(row[E_TAG]) << 16 | self._serve(row))
            take(ring, count)

    def _serve(self, row: NDArray[np.int64]) -> int:
        op, nbytes = int(row[E_OP]), int(row[E_NBYTES])
        opcode, options = op & 0xFF, op >> 16 & 0xFF
        key = np.ascontiguousarray(row[E_KEY0 : E_KEY1 + 1]).tobytes()[: op >> 8 & 0xFF]
        self.served.add(_NAMES[opcode])
        try:
            if opcode == KV_STORE:
                return self._store(key, options, int(row[E_BUFFER]), nbytes)
            if opcode == KV_DELETE:
                # As a device does with "error on delete of a non-existent key" set, so that a kernel learns of it.
                return 0 if self._records.delete(from_bytes([key]))[0] else KV_KEY_DOES_NOT_EXIST
            if opcode == KV_LIST:
                return self._list(key, int(row[E_BUFFER]), nbytes)
            self._records.commit()
            return 0
        except Exception as error:  # the kernel that asked gets a status
            return _status(error)

    def _store(self, key: bytes, options: int, buffer: int, nbytes: int) -> int:
        if self._value_bytes is not None and nbytes != self._value_bytes:
            return KV_INVALID_VALUE_SIZE
        value = view_of(buffer, nbytes, np.uint8).tobytes() if nbytes else b""
        with self._records.lock:
            if options & (STORE_IF_EXISTS | STORE_IF_MISSING):
                there = bool(self._records.contains(from_bytes([key]))[0])
                if there and options & STORE_IF_MISSING:
                    return KV_KEY_EXISTS
                if not there and options & STORE_IF_EXISTS:
                    return KV_KEY_DOES_NOT_EXIST
            self._records.put_one(key, value, integer=len(key) == INT_KEY)
        return 0

    def _list(self, start: bytes, buffer: int, nbytes: int) -> int:
        keys = self._records.entries()[0]._replace(integers=False)  # the command knows bytes only
        if start:
            keys = with_prefix(keys, b"", start)
        data = pack_list(in_byte_order(keys).to_list(), nbytes)
        if len(data) > nbytes:
            return KV_INVALID_VALUE_SIZE
        view_of(buffer, nbytes, np.uint8)[: len(data)] = np.frombuffer(data, np.uint8)
        return 0


def pack_list(keys: Sequence[Any], nbytes: int) -> bytes:
    """Return the answer to a list command, with as many keys as fit.

    Their number (u32), then for each its length (u16) and bytes, padded to a multiple of 4.
    """
    out, count = bytearray(4), 0
    for key in keys:
        size = -(-(2 + len(key)) // 4) * 4
        if len(out) + size > nbytes:
            break
        out += struct.pack("<H", len(key)) + key.ljust(size - 2, b"\0")
        count += 1
    out[:4] = struct.pack("<I", count)
    return bytes(out)


_STATUS: list[tuple[type[Exception], int]] = [
    (errors.StorageFullError, CAPACITY_EXCEEDED),
    (errors.StoreFailedError, WRITE_FAULT),
    (errors.ReadOnlyError, NAMESPACE_WRITE_PROTECTED),
    (errors.ClosedError, NAMESPACE_NOT_READY),
    (errors.ValueSizeError, KV_INVALID_VALUE_SIZE),
]


def _status(error: Exception) -> int:
    return next((status for kind, status in _STATUS if isinstance(error, kind)), INTERNAL_ERROR)
