"""`Near`, `Far`: the native memory of the two ends of a mirrored ring; `Kind`: what the ends tell each other.

Every message is ``(Op.CUDA, kind, ..)``; `client` is the near end's number of a connection, never used again::

    near to far   ASK     ordinal, protocol                          what is the device?
                  OPEN    client, ordinal, protocol                  start a worker
                  SHIP    client, from, to, bytes, stops             ring bytes from .. to; of padding its head alone
                  CLOSE   client                                     end the worker
    far to near   KNOWN   ordinal, facts or None, code, line         None: refused for that
                  OPENED  client, facts or None, code, line
                  BACK    client, answers, places                    what `ww_near_apply` takes; places that are done
                  ENDED   client                                     the worker is gone, nothing more comes

A stop is an entry with bytes: ``(end of the entry, place, use, bytes, way, payload)``. The payload of what goes in is
the bytes themselves up to `Relay.inline`, else the tag of a bulk copy; that of what comes out is the tag of the copy
that the near end awaits. A place that is done: ``(place, use, result, payload)``, with None where no bytes come.
The bytes of a place and the messages may overtake each other.
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
"""Ways of bytes, as ``enum ww_way``."""

_BLOCK = 192 << 10
"""Room of a block: its last entry may have 64 KiB."""
_STOPS = 32
_STOP = struct.Struct("=QIIII")
_DONE = struct.Struct("=IIi")
_PLACES = 64
NOTHING, WRONG, GONE, STOPPED = 0, -1, -2, -3
"""What `Near.take` returns besides a number of bytes."""


@enum.unique
class Kind(enum.IntEnum):
    """What a message between the ends is."""

    ASK = 1
    OPEN = 2
    SHIP = 3
    CLOSE = 4
    KNOWN = 16
    OPENED = 17
    BACK = 18
    ENDED = 19


class Relay:
    """The native part: functions that wait without the interpreter lock, and quick ones that keep it.

    Attributes
    ----------
    place, inline : int
        Bytes of a place, and up to which they travel in messages.
    """

    def __init__(self, path: Path) -> None:
        self.slow, self.quick = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
        for library in (self.slow, self.quick):
            for name in ("ww_near_make", "ww_near_staging", "ww_far_make", "ww_far_staging"):
                getattr(library, name).restype = ctypes.c_void_p
        sizes = (ctypes.c_uint32 * 3)()
        self.quick.ww_sizes(sizes)
        self._facts, self.place, self.inline = sizes

    def facts(self, facts: bytes, opened: bool) -> bytes:
        """Return facts of a worker as clients of the near end see them."""
        if len(facts) != self._facts:
            raise PoolError(f"facts of a device have {len(facts)} bytes: the hosts have different versions of warpwell")
        changed = ctypes.create_string_buffer(facts, len(facts))
        self.quick.ww_near_facts(changed, int(opened))
        return changed.raw

    def gone(self, descriptor: int, pidfd: int) -> bool:
        """Whether the other end of a socket is gone, or its process."""
        return bool(self.quick.ww_gone(descriptor, pidfd))


class _Memory:
    """Memory of one client, which lasts as long as anybody holds this object: transfers do."""

    def __init__(self, relay: Relay, kind: str, address: int) -> None:
        self.relay, self.at = relay, ctypes.c_void_p(address)
        self.staging = int(getattr(relay.quick, f"ww_{kind}_staging")(self.at))
        weakref.finalize(self, getattr(relay.quick, f"ww_{kind}_free"), self.at).atexit = False

    def region(self, place: int, nbytes: int) -> Region:
        """Return the region of a place's bytes."""
        return Region(self.staging + place * self.relay.place, nbytes, self.relay.place, None, self)

    def read(self, place: int, nbytes: int) -> bytes:
        """Return a place's bytes."""
        return ctypes.string_at(self.staging + place * self.relay.place, nbytes)

    def write(self, place: int, data: bytes) -> None:
        """Write a place's bytes."""
        ctypes.memmove(self.staging + place * self.relay.place, data, min(len(data), self.relay.place))


class Near(_Memory):
    """Ring, status and staging of a client, made and sealed as a worker's.

    Attributes
    ----------
    descriptors : list of int
        Of the three, for the client; whoever has sent them closes them.

    Raises
    ------
    MemoryError
    """

    def __init__(self, relay: Relay) -> None:
        fds = (ctypes.c_int * 3)()
        address = relay.slow.ww_near_make(fds)
        if not address:
            raise MemoryError("there is no shared memory for a client")
        self.descriptors = list(fds)
        super().__init__(relay, "near", address)
        self._out = ctypes.create_string_buffer(_BLOCK)
        self._stops = ctypes.create_string_buffer(_STOPS * _STOP.size)

    def take(self, line: int, pidfd: int, seconds: float) -> tuple[int, Any]:
        """Wait for entries of the ring and take them; one thread.

        Returns
        -------
        int, tuple
            Their bytes, and ``(from, to, bytes, stops without payloads)``; or one of the codes above, and None.
        """
        start, end, stops = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_uint32(_STOPS)
        code = int(
            self.relay.slow.ww_near_take(
                self.at,
                line,
                pidfd,
                self._out,
                _BLOCK,
                self._stops,
                ctypes.byref(stops),
                ctypes.byref(start),
                ctypes.byref(end),
                int(seconds * 1000),
            )
        )
        if code <= 0:
            return code, None
        found = _STOP.iter_unpack(ctypes.string_at(self._stops, stops.value * _STOP.size)) if stops.value else ()
        return code, (start.value, end.value, ctypes.string_at(self._out, code), list(found))

    def stop(self) -> None:
        """Let `take` return STOPPED from now on."""
        self.relay.quick.ww_near_stop(self.at)

    def sticky(self, code: int) -> None:
        """Store the code with which the context is lost."""
        self.relay.quick.ww_near_sticky(self.at, code)

    def apply(self, answers: bytes) -> bool:
        """Store what the far end has sent back; False if it makes no sense."""
        return int(self.relay.slow.ww_near_apply(self.at, answers, ctypes.c_size_t(len(answers)))) == 0

    def done(self, place: int, use: int, result: int) -> None:
        """Store that a place is done."""
        self.relay.quick.ww_near_place(self.at, place, ctypes.c_uint32(use), result)


class Far(_Memory):
    """Ring, status and staging of a worker, as its client maps them. The descriptors stay the caller's.

    Raises
    ------
    MemoryError
    """

    def __init__(self, relay: Relay, descriptors: list[int]) -> None:
        address = relay.slow.ww_far_make((ctypes.c_int * 3)(*descriptors))
        if not address:
            raise MemoryError("the worker's memory cannot be mapped")
        super().__init__(relay, "far", address)
        self._out = ctypes.create_string_buffer(_BLOCK)
        self._places = ctypes.create_string_buffer(_PLACES * _DONE.size)
        self._ended = ctypes.c_int(0)

    def copy(self, start: int, end: int, block: bytes) -> bool:
        """Put a block into the ring, unpublished; False if it makes no sense."""
        return not self.relay.quick.ww_far_copy(
            self.at, ctypes.c_uint64(start), ctypes.c_uint64(end), block, ctypes.c_uint32(len(block))
        )

    def publish(self, head: int) -> None:
        """Let the worker read up to there."""
        self.relay.quick.ww_far_publish(self.at, ctypes.c_uint64(head))

    def wait(self, line: int, seconds: float) -> tuple[bytes, list[tuple[int, int, int]], bool]:
        """Wait for something new of the worker; one thread.

        Returns
        -------
        bytes, list, bool
            What `Near.apply` takes, or nothing; the places that are done; whether the worker has ended. Then call it
            until it returns nothing.
        """
        places = ctypes.c_uint32()
        n = int(
            self.relay.slow.ww_far_wait(
                self.at,
                line,
                self._out,
                _BLOCK,
                self._places,
                ctypes.byref(places),
                ctypes.byref(self._ended),
                int(seconds * 1000),
            )
        )
        found = _DONE.iter_unpack(ctypes.string_at(self._places, places.value * _DONE.size)) if places.value else ()
        return ctypes.string_at(self._out, n), list(found), bool(self._ended.value)
