"""Shared-memory primitives of device code, as documented stubs.

Device code is plain Python over signed 64-bit integers; an address is the byte address of memory that the
device can reach. Each stub has a compiled body for every target (``_cpu.py``, ``_cuda.py``); called as plain
Python it asks the running interpreter (``interp.py``), so the same source runs under all three.

The orders are those of the C++ and PTX memory models: ``relaxed``, ``acquire`` and ``release``; every
read-modify-write is acquire-release. The scope names who must agree: the threads of a `BLOCK`, of the
`DEVICE`, or of the whole `SYSTEM` (host threads included). A thread calls each of these by itself unless
the docstring says that a warp does.
"""

from __future__ import annotations

import ctypes
from typing import Any

from .device import device
from .interp.checked_numpy import out_of_range
from .interp.interpreter import current

BLOCK = 0
"""Scope: threads of one block."""
DEVICE = 1
"""Scope: threads of one device."""
SYSTEM = 2
"""Scope: every thread that reaches the memory, those of the host included."""


# -- 64-bit words -----------------------------------------------------------------------------------------


def load_relaxed(addr: int, scope: int) -> int:
    """Return the word at `addr`; atomic, orders nothing."""
    return current().load_relaxed(addr, scope)


def load_acquire(addr: int, scope: int) -> int:
    """Return the word at `addr`; later accesses of this thread stay after it."""
    return current().load_acquire(addr, scope)


def store_relaxed(addr: int, value: int, scope: int) -> None:
    """Store `value` at `addr`; atomic, orders nothing."""
    current().store_relaxed(addr, value, scope)


def store_release(addr: int, value: int, scope: int) -> None:
    """Store `value` at `addr`; earlier accesses of this thread stay before it, later ones are not held."""
    current().store_release(addr, value, scope)


def exchange(addr: int, value: int, scope: int) -> int:
    """Store `value` and return what was there; acquire-release."""
    return current().exchange(addr, value, scope)


def compare_exchange(addr: int, expected: int, desired: int, scope: int) -> int:
    """Store `desired` where the word equals `expected`; return the old word (equal means success)."""
    return current().compare_exchange(addr, expected, desired, scope)


def fetch_add(addr: int, value: int, scope: int) -> int:
    """Add `value` and return the old word; acquire-release."""
    return current().fetch_add(addr, value, scope)


def fetch_or(addr: int, value: int, scope: int) -> int:
    """Or `value` in and return the old word; acquire-release."""
    return current().fetch_or(addr, value, scope)


def fetch_and(addr: int, value: int, scope: int) -> int:
    """And `value` in and return the old word; acquire-release."""
    return current().fetch_and(addr, value, scope)


def fence(scope: int) -> None:
    """Acquire-release fence: accesses before it stay before those after it (store then load excepted)."""
    current().fence(scope)


# -- items of a NumPy scalar dtype of 1, 2, 4 or 8 bytes, which must be a compile-time constant --------------


def load_relaxed_as(addr: int, dtype: Any) -> Any:
    """Return the item of `dtype` at `addr`; device scope, orders nothing."""
    return current().load_relaxed_as(addr, dtype)


def load_acquire_as(addr: int, dtype: Any) -> Any:
    """Return the item of `dtype` at `addr`; device scope, later accesses stay after it."""
    return current().load_acquire_as(addr, dtype)


def store_relaxed_as(addr: int, value: Any, dtype: Any) -> None:
    """Store `value` as an item of `dtype`; device scope, orders nothing."""
    current().store_relaxed_as(addr, value, dtype)


def load_weak_as(addr: int, dtype: Any) -> Any:
    """Return the item at `addr` by an ordinary load, for memory that no other thread writes meanwhile."""
    return current().load_weak_as(addr, dtype)


def store_weak_as(addr: int, value: Any, dtype: Any) -> None:
    """Store an item by an ordinary store, for memory that no other thread accesses meanwhile."""
    current().store_weak_as(addr, value, dtype)


def fetch_add_as(addr: int, value: Any, dtype: Any) -> Any:
    """Add to an item of a 4- or 8-byte number dtype and return the old one; relaxed, device scope."""
    return current().fetch_add_as(addr, value, dtype)


def bits_as(bits: int, dtype: Any) -> Any:
    """Reinterpret the low bytes of a 64-bit word as an item of `dtype`."""
    return current().bits_as(bits, dtype)


def as_bits(value: Any, dtype: Any) -> int:
    """Return the bytes of `value`, converted to `dtype`, in the low end of a 64-bit word."""
    return current().as_bits(value, dtype)


def copy_wide(dst: int, src: int, stride: int, count: int) -> None:
    """Copy `count` (1 to 4) 16-byte pieces that lie `stride` bytes apart.

    All loads are issued before the first store, so that their latencies overlap. Relaxed accesses of
    system scope; both addresses are multiples of 16.
    """
    current().copy_wide(dst, src, stride, count)


# -- warps: on `cpu` and `interp` a warp has one lane -------------------------------------------------------


def lane_id() -> int:
    """Return the position of the calling thread in its warp."""
    return current().lane_id()


def warp_size() -> int:
    """Return the number of lanes of a warp: 32 on `cuda`, 1 elsewhere."""
    return current().warp_size()


def activemask() -> int:
    """Return the lanes that run converged with the caller, as a bit mask."""
    return current().activemask()


def ballot(mask: int, predicate: bool) -> int:
    """Return the lanes of `mask` whose predicate holds. Every lane of `mask` must call it; orders nothing."""
    return current().ballot(mask, predicate)


def any_sync(mask: int, predicate: bool) -> bool:
    """Tell whether the predicate holds in any lane of `mask`. Every lane of `mask` must call it."""
    return current().any_sync(mask, predicate)


def shfl(mask: int, value: int, lane: int) -> int:
    """Return the 64-bit `value` of another lane. Every lane of `mask` must call it; orders nothing."""
    return current().shfl(mask, value, lane)


def match_any(mask: int, value: int) -> int:
    """Return the lanes of `mask` that have the caller's `value`. Every lane of `mask` must call it."""
    return current().activemask()


def syncwarp(mask: int) -> None:
    """Wait for the lanes of `mask`; their accesses before it are ordered before all of theirs after it."""
    current().syncwarp(mask)


def popc(value: int) -> int:
    """Return the number of ones in a 64-bit word."""
    return int(value & 0xFFFFFFFFFFFFFFFF).bit_count()


def ffs(value: int) -> int:
    """Return the position of the lowest one, counted from 1; 0 where there is none."""
    return (value & -value).bit_length()


# -- where and when a thread runs ---------------------------------------------------------------------------


def grid(ndim: int) -> Any:
    """Return the index of the calling thread in the launch: an integer for 1, a tuple for 2 and 3."""
    return current().grid(ndim)


def launch_flag() -> int:
    """Return the address of the flag of the calling thread's launch (`cuda`: of plain ones; see `block.own_flag`)."""
    return int(current().flag.address)


def interrupted() -> int:
    """Return whether the launch of the calling thread was interrupted (0 on `cuda`, whose flag and latch tell it)."""
    return current().interrupted()


@device
def failed() -> bool:
    """Tell whether an access of this launch to an array has failed, or Ctrl-C ended the launch.

    User loops that ask can stop. A thread calls it. It is one relaxed load of host memory: on a GPU, ask every so many
    iterations. In a plain Numba kernel it tells of all such kernels of the process.
    """
    return load_relaxed(launch_flag(), SYSTEM) != 0 or interrupted() != 0


def clock_ns() -> int:
    """Return a monotonic time in nanoseconds (`interp`: logical time)."""
    return current().clock_ns()


def backoff(attempt: int) -> None:
    """Wait a little, longer with each `attempt` (0, 1, 2, ...), up to about a millisecond."""
    current().backoff(attempt)


def rem(a: int, b: int) -> int:
    """Return ``a % b`` for non-negative `a` and positive `b`; never checked, never raises."""
    return a % b


def div(a: int, b: int) -> int:
    """Return ``a // b`` for non-negative `a` and positive `b`; never checked, never raises."""
    return a // b


def i64(value: int) -> int:
    """Wrap an integer to signed 64 bits, as compiled code does by itself."""
    value = int(value) & 0xFFFFFFFFFFFFFFFF
    return value - 0x10000000000000000 if value >> 63 else value


# -- native host code only: service threads, never a GPU ----------------------------------------------------


def copy_bytes(dst: int, src: int, nbytes: int) -> None:
    """Copy bytes between host buffers (`cpu`, `interp`)."""
    current().copy_bytes(dst, src, nbytes)


def crc32c(address: int, nbytes: int, seed: int) -> int:
    """Return the CRC-32C (0 to 2**32 - 1) of bytes that nobody writes meanwhile (`cpu`, `interp`).

    `seed` is the CRC of what comes before them, 0 at the start.
    """
    return current().crc32c(address, nbytes, seed)


def prefetch(address: int) -> None:
    """Begin to load the cache line at `address`, which may be any number (`cpu`; nothing on `interp`)."""


def guarded_ranges() -> int:
    """Return the address of the table of mapped files that are guarded (compiled host code; see `bus_error`)."""
    raise RuntimeError("guarded_ranges is compiled host code")


def pread(fd: int, address: int, nbytes: int, offset: int) -> int:
    """Read from a file descriptor; return the number of bytes, or minus errno (`cpu`, `interp`)."""
    return current().pread(fd, address, nbytes, offset)


def pwrite(fd: int, address: int, nbytes: int, offset: int) -> int:
    """Write to a file descriptor; return the number of bytes, or minus errno (`cpu`, `interp`)."""
    return current().pwrite(fd, address, nbytes, offset)


def call_native(function: int, state: int, a: int, b: int, c: int, d: int, e: int) -> int:
    """Call a native function (`targets.native`) by address with its state and five words."""
    return current().call_native(function, state, a, b, c, d, e)


def call_foreign(function: int, a: int, b: int, c: int, d: int, e: int, f: int, g: int) -> int:
    """Call a C function of at most seven integers and pointers by address (`cpu` only); others are ignored.

    Where it returns an ``int``, only the lower 32 bits of the answer count.
    """
    return int(ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 7)(function)(a, b, c, d, e, f, g))


def call_cold(function: Any, *args: Any) -> Any:
    """Call a device function that stays a call: rare paths do not cost the caller registers or code."""
    return function(*args)


def element_address(array: Any, index: Any) -> int:
    """Return the address of an item of a NumPy or device array.

    The index is an item's, and not negative. Compiled code does not look at it, unless the launch has bounds checks.
    """
    position = index if isinstance(index, tuple) else (index,)
    for i, extent in zip(position, array.shape, strict=True):
        if not 0 <= i < extent:
            kernel, name = getattr(array, "said", None) or ("?", "?")
            raise out_of_range(kernel, name, int(i), extent)
    return int(array.ctypes.data + sum(int(i) * s for i, s in zip(position, array.strides, strict=True)))
