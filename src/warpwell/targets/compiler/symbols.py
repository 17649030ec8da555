"""Addresses of this process that compiled code finds by name: object code from the on-disk cache has no addresses."""

from __future__ import annotations

import ctypes

import llvmlite.binding as llvm

from ..._os import clock

_libc = ctypes.CDLL(None, use_errno=True)
_tls_key, _seat_key = ctypes.c_uint32(), ctypes.c_uint32()
TLS_KEY, SEAT_KEY = "warpwell_tls_key", "warpwell_seat_key"
for _made, _symbol in ((_tls_key, TLS_KEY), (_seat_key, SEAT_KEY)):
    if _libc.pthread_key_create(ctypes.byref(_made), None) != 0:
        raise OSError("pthread_key_create failed: no thread-local key is left in this process")
    llvm.add_symbol(_symbol, ctypes.addressof(_made))
COPY = "warpwell_copy"
"""The C library's memcpy, by another name: a compiler that knows memcpy may read its source again, or later."""
llvm.add_symbol(COPY, ctypes.cast(_libc.memcpy, ctypes.c_void_p).value)
CLOCK_OFFSET = "warpwell_clock_offset"
"""Nanoseconds that `clock_ns` adds to the monotonic clock: 0, except under test."""
llvm.add_symbol(CLOCK_OFFSET, clock.offset_address)
GUARDED_RANGES = "warpwell_guarded_ranges"
"""The table of `bus_error`, which adds it before code that names it is compiled or loaded."""


def forget_context() -> None:
    """Clear the context of the calling thread, after an exception ended launch code."""
    _libc.pthread_setspecific(_tls_key, None)
