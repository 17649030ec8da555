"""Mapped files that may be truncated or fail while native code reads them: zeros instead of a killed process.

The system sends SIGBUS, which kills the process, if a page of a mapped file cannot be read, is after the file's end, or
has no space on a full disk. For ranges that `map_guarded` maps, a handler replaces the page that failed by zeros, and
the access continues. There are two kinds of ranges:

- `PAGE_OF_ZEROS`: the page that failed becomes zeros. Readers verify a checksum, and read the page again if it is
  wrong.
- `REST_OF_ZEROS`, `REST_TO_WRITE`: the range keeps its first failure for `failure`, the launch is flagged as failed,
  and all pages from the page that failed to the end of the range become zeros (for `REST_TO_WRITE` in writable memory):
  one signal instead of one per page, and stores without effect instead of a killed process.

Any other SIGBUS goes to the previous handler.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import signal
from collections import deque

import numpy as np

from .native import native
from .primitives import (
    SYSTEM,
    call_native,
    compare_exchange,
    guarded_ranges,
    load_acquire,
    load_relaxed,
    load_weak_as,
    own_launch_flag,
    store_relaxed,
)

CAPACITY = 1 << 16
"""Maximum number of ranges."""

PAGE_OF_ZEROS, REST_OF_ZEROS, REST_TO_WRITE = range(3)

# -- table, in words -----------------------------------------------------------------------------------------
W_COUNT, W_MMAP, W_SIGACTION, W_PREVIOUS, W_DEFAULT, W_PASSED = range(6)
"""The number of ranges to check; addresses of mmap, sigaction, the previous action and the system's own action.

`W_PASSED` is 1 after a signal was passed on to the previous action: if that action passes it back, it is not handled.
"""
W_RANGES = 8
"""First word of the ranges; each has the words below."""
RANGE_WORDS = 4
R_START, R_END, R_KIND, R_FAILED = range(RANGE_WORDS)
"""The start is 0 if the range is free. `R_FAILED` is twice the first address that failed, plus 1 for a store, or 0."""

_PAGE = mmap.PAGESIZE
_FIXED = 0x10
_SA_SIGINFO = 4
_SA_ONSTACK = 0x08000000
_SIGBUS = int(signal.SIGBUS)
_ADDRESS_IN_INFO = 16
_ERROR_IN_CONTEXT = 192
"""Byte of the processor's error code in ``ucontext_t`` (x86-64); its bit 1 says that it was a store."""
_PROT_READ = int(mmap.PROT_READ)
_PROT_WRITE = int(mmap.PROT_WRITE)
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
    """The handler. It only stores words and maps pages, which is safe at any point of the interrupted code."""
    table = guarded_ranges()
    address = load_weak_as(info + _ADDRESS_IN_INFO, _I8)
    for k in range(load_acquire(table + 8 * W_COUNT, SYSTEM)):
        entry = table + 8 * (W_RANGES + RANGE_WORDS * k)
        start = load_acquire(entry + 8 * R_START, SYSTEM)
        end = load_relaxed(entry + 8 * R_END, SYSTEM)
        if start != 0 and start <= address and address < end:
            page = address & ~(_PAGE - 1)
            nbytes = _PAGE
            allowed = _PROT_READ
            kind = load_relaxed(entry + 8 * R_KIND, SYSTEM)
            if kind != PAGE_OF_ZEROS:
                # record the failure before the zeros can be read
                stored = (load_weak_as(context + _ERROR_IN_CONTEXT, _I8) >> 1) & 1
                compare_exchange(entry + 8 * R_FAILED, 0, 2 * address + stored, SYSTEM)
                flag = own_launch_flag()
                if flag != 0:
                    store_relaxed(flag, 1, SYSTEM)
                nbytes = (end - page + _PAGE - 1) & ~(_PAGE - 1)
                if kind == REST_TO_WRITE:
                    allowed = _PROT_READ | _PROT_WRITE
            got = call_native(load_relaxed(table + 8 * W_MMAP, SYSTEM), page, nbytes, allowed, _ZEROS, -1, 0)
            if got == page:
                return 0
    # The address is not guarded: restore the previous action, so that the access fails again and that action handles
    # it. If it passes the signal back (because it has this handler as its predecessor), the system's own action ends
    # the process.
    action = W_PREVIOUS
    if load_relaxed(table + 8 * W_PASSED, SYSTEM) != 0:
        action = W_DEFAULT
    store_relaxed(table + 8 * W_PASSED, 1, SYSTEM)
    call_native(
        load_relaxed(table + 8 * W_SIGACTION, SYSTEM), _SIGBUS, load_relaxed(table + 8 * action, SYSTEM), 0, 0, 0, 0
    )
    return 0


_libc = ctypes.CDLL(None, use_errno=True)
_libc.sigaction.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value
_previous, _default = _Action(), _Action()
TABLE = (ctypes.c_int64 * (W_RANGES + RANGE_WORDS * CAPACITY))()
"""The table; its address never changes, and compiled code finds it by its symbol."""


# No lock: a finalizer may call these functions at any point, even within them, and so may a forked child. Each step
# below is atomic.
_free = deque(range(CAPACITY))
_slots: dict[int, int] = {}


def map_guarded(fd: int, nbytes: int, kind: int = PAGE_OF_ZEROS) -> int | None:
    """Map the first bytes of a file and guard them; return the address, or None if that is not possible.

    `nbytes` may exceed the file's size, because it may grow. Stores are possible with `REST_TO_WRITE`.
    """
    allowed = _PROT_READ | (_PROT_WRITE if kind == REST_TO_WRITE else 0)
    address = _libc.mmap(None, nbytes, allowed, mmap.MAP_SHARED, fd, 0)
    if address == _FAILED or address is None:
        return None
    try:
        slot = _free.popleft() if handled() else None
    except IndexError:
        slot = None
    if slot is None:
        _libc.munmap(address, nbytes)
        return None
    at = W_RANGES + RANGE_WORDS * slot
    TABLE[at + R_END], TABLE[at + R_KIND], TABLE[at + R_FAILED] = address + nbytes, kind, 0
    TABLE[at + R_START] = address
    _slots[address] = slot
    return int(address)


def unmap(address: int, nbytes: int) -> None:
    """Unmap what `map_guarded` mapped; no thread may be reading it."""
    slot = _slots.pop(address)
    TABLE[W_RANGES + RANGE_WORDS * slot + R_START] = 0
    _free.appendleft(slot)
    _libc.munmap(address, nbytes)


def failure(address: int) -> tuple[int, bool] | None:
    """Return the address at which the guarded range at `address` first failed, and whether by a store; else None."""
    found = TABLE[W_RANGES + RANGE_WORDS * _slots[address] + R_FAILED]
    return (found >> 1, bool(found & 1)) if found else None


def failure_word(address: int) -> int:
    """Return the address of a word that is 0 until the guarded range at `address` fails, for native code.

    The word changes before the zeros can be read.
    """
    return ctypes.addressof(TABLE) + 8 * (W_RANGES + RANGE_WORDS * _slots[address] + R_FAILED)


@functools.cache
def _handler() -> int:
    """Return the address of the handler, loaded without Numba if it was compiled before."""
    import llvmlite.binding as llvm

    from .compiler.symbols import GUARDED_RANGES

    llvm.add_symbol(GUARDED_RANGES, ctypes.addressof(TABLE))
    return on_bus_error.address


def handled() -> bool:
    """Install the handler again if another handler has replaced it; return False if that is impossible."""
    handler = _handler()
    now = _Action()
    if _libc.sigaction(_SIGBUS, None, ctypes.byref(now)) != 0:
        return False
    if now.handler == handler:
        return True
    ctypes.memmove(ctypes.byref(_previous), ctypes.byref(now), ctypes.sizeof(now))
    TABLE[W_COUNT] = CAPACITY
    TABLE[W_PREVIOUS], TABLE[W_DEFAULT] = ctypes.addressof(_previous), ctypes.addressof(_default)
    TABLE[W_PASSED] = 0
    TABLE[W_MMAP] = ctypes.cast(_libc.mmap, ctypes.c_void_p).value or 0
    TABLE[W_SIGACTION] = ctypes.cast(_libc.sigaction, ctypes.c_void_p).value or 0
    action = _Action(handler, (ctypes.c_byte * 128)(), _SA_SIGINFO | _SA_ONSTACK, None)
    return int(_libc.sigaction(_SIGBUS, ctypes.byref(action), None)) == 0
