"""Mapped files that may be cut or fail while native code reads them: zeros instead of a killed process.

The system answers an access to a page of a mapped file that it cannot read, or that lies behind the file's end,
with SIGBUS, which kills the process. For the ranges that are `guard`ed here a handler puts a page of zeros in
the place of the one that failed, and the access goes on. Whoever reads has a checksum and looks further when it
is wrong. Any other SIGBUS goes to whatever handled it before.
"""

from __future__ import annotations

import ctypes
import mmap
import signal
from collections import deque

import numpy as np

from .atomics import SYSTEM, call_native, guarded_ranges, load_acquire, load_relaxed, load_weak_as
from .native import native

CAPACITY = 1 << 16
"""Ranges."""

# -- table, in words -----------------------------------------------------------------------------------------
W_COUNT = 0
"""Ranges to look at; then `CAPACITY` pairs of start and end, start 0 where free."""
W_MMAP = 1
W_SIGACTION = 2
W_PREVIOUS = 3
"""Address of the action that was there before."""
W_RANGES = 8

_PAGE = mmap.PAGESIZE
_FIXED = 0x10
_SA_SIGINFO = 4
_SA_ONSTACK = 0x08000000
_SIGBUS = int(signal.SIGBUS)
_ADDRESS_IN_INFO = 16
_PROT_READ = int(mmap.PROT_READ)
_ZEROS = int(mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) | _FIXED
_I8 = np.dtype(np.int64)


class _Action(ctypes.Structure):
    """``struct sigaction`` of the C library."""

    _fields_ = [
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_byte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    ]


@native
def on_bus_error(number: int, info: int, context: int, a: int, b: int, c: int) -> int:
    """The handler. It only maps a page, which is safe wherever the signal came."""
    table = guarded_ranges()
    address = load_weak_as(info + _ADDRESS_IN_INFO, _I8)
    for k in range(load_acquire(table + 8 * W_COUNT, SYSTEM)):
        start = load_acquire(table + 8 * (W_RANGES + 2 * k), SYSTEM)
        if start != 0 and start <= address and address < load_relaxed(table + 8 * (W_RANGES + 2 * k + 1), SYSTEM):
            page = address & ~(_PAGE - 1)
            got = call_native(load_relaxed(table + 8 * W_MMAP, SYSTEM), page, _PAGE, _PROT_READ, _ZEROS, -1, 0)
            if got == page:
                return 0
    # Not ours: with the former action back in its place, the access fails again and goes there.
    call_native(
        load_relaxed(table + 8 * W_SIGACTION, SYSTEM),
        _SIGBUS,
        load_relaxed(table + 8 * W_PREVIOUS, SYSTEM),
        0,
        0,
        0,
        0,
    )
    return 0


_libc = ctypes.CDLL(None)
_libc.sigaction.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
_previous = _Action()
TABLE = (ctypes.c_int64 * (W_RANGES + 2 * CAPACITY))()
"""At one place for the life of the process; compiled code finds it by its symbol."""


# No lock: finalizers come here in the middle of anything, also of these functions, and forked children. Each step below
# is one that no other interrupts.
_free = deque(range(CAPACITY))
_places: dict[int, int] = {}


def guard(address: int, nbytes: int) -> bool:
    """Guard a mapped range from now on; return False where it is not possible (then do not read it).

    `release` it before it is unmapped.
    """
    if not _installed():
        return False
    try:
        place = _free.popleft()
    except IndexError:
        return False
    TABLE[W_RANGES + 2 * place + 1] = address + nbytes
    TABLE[W_RANGES + 2 * place] = address
    _places[address] = place
    return True


def release(address: int) -> None:
    """Guard a range no more."""
    place = _places.pop(address, None)
    if place is not None:
        TABLE[W_RANGES + 2 * place] = 0
        _free.appendleft(place)


def _installed() -> bool:
    """See to it that ours is the handler; others may have come after it."""
    from .compiler.cpu_bodies import provide_guarded_ranges  # imports the compiler

    provide_guarded_ranges(ctypes.addressof(TABLE))
    handler = on_bus_error.address
    now = _Action()
    if _libc.sigaction(_SIGBUS, None, ctypes.byref(now)) != 0:
        return False
    if now.handler == handler:
        return True
    ctypes.memmove(ctypes.byref(_previous), ctypes.byref(now), ctypes.sizeof(now))
    TABLE[W_COUNT] = CAPACITY
    TABLE[W_PREVIOUS] = ctypes.addressof(_previous)
    TABLE[W_MMAP] = ctypes.cast(_libc.mmap, ctypes.c_void_p).value or 0
    TABLE[W_SIGACTION] = ctypes.cast(_libc.sigaction, ctypes.c_void_p).value or 0
    ours = _Action(handler, (ctypes.c_byte * 128)(), _SA_SIGINFO | _SA_ONSTACK, None)
    return int(_libc.sigaction(_SIGBUS, ctypes.byref(ours), None)) == 0
