"""`Near`, `Far`: the native memory of the two sides of a mirrored ring; `Kind`: their messages.

Each message is ``(Op.CUDA, kind, ..)``; `client` is the near side's number of a connection, which is not reused::

    near to far   QUERY   ordinal, protocol                   request the properties of a device
                  OPEN    client, ordinal, protocol           start a worker
                  SHIP    client, from, to, bytes, stops      bytes of the ring; for padding, only its head
                  CLOSE   client                              stop the worker
    far to near   FACTS   ordinal, facts or None, code, text  reply to QUERY; if refused, None, a CUDA error, a reason
                  OPENED  client, facts or None, code, text   reply to OPEN
                  BACK    client, answers, slots              input of `ww_near_apply`; completed staging slots
                  ENDED   client                              the worker has exited; the last message

A stop is an entry of the ring that moves data: ``(end of the entry, slot, use, bytes, direction, payload)``. The
payload of IN is the data, or the tag of a bulk copy if the data exceeds `Relay.inline`. The payload of OUT is the tag
of the copy that the near side receives. A completed slot is ``(slot, use, result, payload)``, with None if no data
follows. Messages and bulk data may overtake each other.
"""

from __future__ import annotations

import ctypes
import enum
import struct
import weakref
from pathlib import Path
from typing import Any

from ...errors import PoolError
from ..transport.bulk import Region

IN, OUT = 1, 2
"""Directions of data, as in ``enum ww_way``."""

_BLOCK = 192 << 10
"""Size of a block in bytes. Its last entry may have 64 KiB."""
_STOPS = 32
_STOP = struct.Struct("=QIIII")
_DONE = struct.Struct("=IIi")
_SLOTS = 64
WRONG, EXITED, STOPPED = -1, -2, -3
"""Codes that `Near.receive_entries` returns: the ring is malformed; the client has exited; `Near.stop` was called."""


@enum.unique
class Kind(enum.IntEnum):
    """Kinds of messages between the sides."""

    QUERY = 1
    OPEN = 2
    SHIP = 3
    CLOSE = 4
    FACTS = 16
    OPENED = 17
    BACK = 18
    ENDED = 19


class Relay:
    """The native library.

    Attributes
    ----------
    blocking, quick : ctypes library
        The library for functions that wait (without the GIL), and for those that do not (with the GIL).
    slot_bytes, inline : int
        Size of a staging slot, and maximum size of data inside a message, in bytes.
    """

    def __init__(self, path: Path) -> None:
        self.blocking, self.quick = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
        for library in (self.blocking, self.quick):
            for name in ("ww_near_make", "ww_near_staging", "ww_far_make", "ww_far_staging"):
                getattr(library, name).restype = ctypes.c_void_p
        sizes = (ctypes.c_uint32 * 3)()
        self.quick.ww_sizes(sizes)
        self._facts_bytes, self.slot_bytes, self.inline = sizes

    def facts(self, facts: bytes, opened: bool) -> bytes:
        """Return a worker's facts, adapted for clients of the near side."""
        if len(facts) != self._facts_bytes:
            raise PoolError(
                f"the facts of a device must have {self._facts_bytes} bytes, got {len(facts)}: install the same "
                f"version of warpwell on all hosts"
            )
        adapted = ctypes.create_string_buffer(facts, len(facts))
        self.quick.ww_near_facts(adapted, int(opened))
        return adapted.raw

    def has_exited(self, descriptor: int, pidfd: int) -> bool:
        """Return True if the peer of a socket has closed it or its process has exited."""
        return bool(self.quick.ww_gone(descriptor, pidfd))


class _Memory:
    """The memory of one client. It is freed with this object, which its transfers reference."""

    def __init__(self, relay: Relay, side: str, address: int) -> None:
        self.relay, self.address = relay, ctypes.c_void_p(address)
        self.staging = int(getattr(relay.quick, f"ww_{side}_staging")(self.address))
        weakref.finalize(self, getattr(relay.quick, f"ww_{side}_free"), self.address).atexit = False

    def region(self, slot: int, nbytes: int) -> Region:
        """Return the region of the data in a slot."""
        return Region(self.staging + slot * self.relay.slot_bytes, nbytes, self.relay.slot_bytes, None, self)

    def read(self, slot: int, nbytes: int) -> bytes:
        """Return the data in a slot."""
        return ctypes.string_at(self.staging + slot * self.relay.slot_bytes, nbytes)

    def write(self, slot: int, data: bytes) -> None:
        """Copy data into a slot."""
        ctypes.memmove(self.staging + slot * self.relay.slot_bytes, data, min(len(data), self.relay.slot_bytes))


class Near(_Memory):
    """Ring, status and staging memory for a client, created and sealed as a worker does.

    Attributes
    ----------
    descriptors : list of int
        Their file descriptors, for the client. The caller closes them.

    Raises
    ------
    MemoryError
        The shared memory cannot be created.
    """

    def __init__(self, relay: Relay) -> None:
        fds = (ctypes.c_int * 3)()
        address = relay.blocking.ww_near_make(fds)
        if not address:
            raise MemoryError("the shared memory for a client cannot be created")
        self.descriptors = list(fds)
        super().__init__(relay, "near", address)
        self._out = ctypes.create_string_buffer(_BLOCK)
        self._stops = ctypes.create_string_buffer(_STOPS * _STOP.size)

    def receive_entries(self, line: int, pidfd: int, seconds: float) -> tuple[int, Any]:
        """Wait at most `seconds` for entries of the ring, and take them. Only one thread calls it.

        Returns
        -------
        int, tuple
            The size of the entries in bytes and ``(from, to, bytes, stops without payloads)``; or WRONG, EXITED,
            STOPPED or 0 (timeout), and None.
        """
        start, end, stops = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_uint32(_STOPS)
        output = self._out, _BLOCK, self._stops, ctypes.byref(stops), ctypes.byref(start), ctypes.byref(end)
        code = int(self.relay.blocking.ww_near_take(self.address, line, pidfd, *output, int(seconds * 1000)))
        if code <= 0:
            return code, None
        entries = list(_STOP.iter_unpack(self._stops.raw[: stops.value * _STOP.size]))
        return code, (start.value, end.value, ctypes.string_at(self._out, code), entries)

    def stop(self) -> None:
        """Make `receive_entries` return STOPPED."""
        self.relay.quick.ww_near_stop(self.address)

    def set_sticky_error(self, code: int) -> None:
        """Store the CUDA error with which the context is lost."""
        self.relay.quick.ww_near_sticky(self.address, code)

    def apply(self, answers: bytes) -> bool:
        """Store answers of the far side. Return False if they are malformed."""
        return int(self.relay.blocking.ww_near_apply(self.address, answers, ctypes.c_size_t(len(answers)))) == 0

    def complete_slot(self, slot: int, use: int, result: int) -> None:
        """Store the result of a completed slot."""
        self.relay.quick.ww_near_place(self.address, slot, ctypes.c_uint32(use), result)


class Far(_Memory):
    """Ring, status and staging memory of a worker, mapped as its client does. The caller keeps the descriptors.

    Raises
    ------
    MemoryError
        The memory cannot be mapped.
    """

    def __init__(self, relay: Relay, descriptors: list[int]) -> None:
        address = relay.blocking.ww_far_make((ctypes.c_int * 3)(*descriptors))
        if not address:
            raise MemoryError("the worker's memory cannot be mapped")
        super().__init__(relay, "far", address)
        self._out = ctypes.create_string_buffer(_BLOCK)
        self._slots = ctypes.create_string_buffer(_SLOTS * _DONE.size)
        self._ended = ctypes.c_int(0)

    def copy(self, start: int, end: int, block: bytes) -> bool:
        """Copy a block into the ring without publishing it. Return False if it is malformed."""
        copied = ctypes.c_uint64(start), ctypes.c_uint64(end), block, ctypes.c_uint32(len(block))
        return not self.relay.quick.ww_far_copy(self.address, *copied)

    def publish(self, head: int) -> None:
        """Let the worker read the ring up to `head`."""
        self.relay.quick.ww_far_publish(self.address, ctypes.c_uint64(head))

    def wait(self, line: int, seconds: float) -> tuple[bytes, list[tuple[int, int, int]], bool]:
        """Wait at most `seconds` for answers of the worker. Only one thread calls it.

        Returns
        -------
        bytes, list, bool
            Input of `Near.apply`, or nothing; the completed slots; whether the worker has exited. After the exit, call
            `wait` until it returns nothing.
        """
        slots = ctypes.c_uint32()
        output = self._out, _BLOCK, self._slots, ctypes.byref(slots), ctypes.byref(self._ended)
        nbytes = int(self.relay.blocking.ww_far_wait(self.address, line, *output, int(seconds * 1000)))
        completed = list(_DONE.iter_unpack(self._slots.raw[: slots.value * _DONE.size]))
        return ctypes.string_at(self._out, nbytes), completed, bool(self._ended.value)
