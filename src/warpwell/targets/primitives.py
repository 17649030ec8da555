"""The primitives of device code: shared memory, warps, and the position and time of a thread.

Device code is plain Python over signed 64-bit integers. An address is the byte address of memory that the device can
reach. Each primitive is a stub in this module, and every target has a body for it: ``compiler/cpu_lowerings.py``,
``compiler/cuda_lowerings.py`` and, for `interp`, the methods of ``interp/interpreter.py``. Outside of a launch, a stub
that needs the running launch raises `RuntimeError`.

**Calling threads.** A thread calls a primitive by itself, unless the docstring says *all lanes of mask*. In that case,
every lane whose bit is set in ``mask`` must call the primitive with the same mask; otherwise the lanes that call it
never return.

**Memory order.** The orders are defined by the memory models of C++ and PTX:

- *relaxed*: the access is atomic, and orders no other access.
- *acquire* (loads, `compare_exchange_acquire`): accesses of the thread that come later in the program stay after it.
- *release* (stores): accesses of the thread that come earlier in the program stay before it.
- *acquire-release*: both. Every read-modify-write of a word (`exchange`, `compare_exchange`, `fetch_*`) is,
  but those whose names say otherwise.
- *weak*: the access is not atomic. Another access to the same item at the same time is a data race.

If a thread acquires a value that another thread has released, it sees everything that the other thread did before its
release. No primitive orders a store before a later load of another word: if two threads need that order, both must use
read-modify-writes of one word.

**Scope.** The scope names the threads between which an order holds: `BLOCK`, `DEVICE` or `SYSTEM`. It must be a
constant. A wider scope than necessary is always correct, but slower on a GPU.

**Blocks.** ``@kernel(block=128)`` makes a kernel whose threads share memory and meet at barriers in blocks; it is
launched over a number of blocks. On `cuda`, a block has this number of threads. On `cpu` and `interp` it has one
thread, so loops should stride by `block_threads` to be correct on every target. *All threads of the block* must call a
primitive whose docstring states this.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from .device import device
from .interp.checked_numpy import out_of_range
from .interp.interpreter import current
from .interp.interpreter import i64 as i64

BLOCK = 0
"""Scope: the threads of one block."""
DEVICE = 1
"""Scope: the threads of one device."""
SYSTEM = 2
"""Scope: all threads that reach the memory: threads of every device and of the host."""


# -- 64-bit words -----------------------------------------------------------------------------------------


def load_relaxed(addr: int, scope: int) -> int:
    """Return the word at `addr`. Relaxed."""
    return current().load_relaxed(addr, scope)


def load_acquire(addr: int, scope: int) -> int:
    """Return the word at `addr`. Acquire: later accesses of this thread stay after it."""
    return current().load_acquire(addr, scope)


def store_relaxed(addr: int, value: int, scope: int) -> None:
    """Store `value` at `addr`. Relaxed."""
    current().store_relaxed(addr, value, scope)


def store_release(addr: int, value: int, scope: int) -> None:
    """Store `value` at `addr`. Release: earlier accesses of this thread stay before it; later ones may pass it."""
    current().store_release(addr, value, scope)


def exchange(addr: int, value: int, scope: int) -> int:
    """Store `value` at `addr` and return the word that was there. Acquire-release."""
    return current().exchange(addr, value, scope)


def compare_exchange(addr: int, expected: int, desired: int, scope: int) -> int:
    """Store `desired` at `addr` if the word there equals `expected`; return the word that was there.

    The exchange took place if the result equals `expected`. Acquire-release if it took place, otherwise acquire.
    """
    return current().compare_exchange(addr, expected, desired, scope)


def compare_exchange_acquire(addr: int, expected: int, desired: int, scope: int) -> int:
    """Do the same as `compare_exchange`, but acquire only: earlier accesses of the program may take place after it."""
    return current().compare_exchange_acquire(addr, expected, desired, scope)


def fetch_add(addr: int, value: int, scope: int) -> int:
    """Add `value` to the word at `addr` and return the word that was there. It wraps. Acquire-release."""
    return current().fetch_add(addr, value, scope)


def fetch_or(addr: int, value: int, scope: int) -> int:
    """Set the bits of `value` in the word at `addr` and return the word that was there. Acquire-release."""
    return current().fetch_or(addr, value, scope)


def fetch_and(addr: int, value: int, scope: int) -> int:
    """Clear the bits that `value` lacks in the word at `addr`; return the word that was there. Acquire-release."""
    return current().fetch_and(addr, value, scope)


def fence(scope: int) -> None:
    """Keep every access of this thread before the fence before every access after it. Acquire-release.

    The exception is a store before the fence and a load after it, which may change places.
    """
    current().fence(scope)


# -- items of a NumPy scalar dtype of 1, 2, 4 or 8 bytes, which must be a compile-time constant --------------


def load_relaxed_as(addr: int, dtype: Any) -> Any:
    """Return the item of `dtype` at `addr`. Relaxed, device scope."""
    return current().load_relaxed_as(addr, dtype)


def load_acquire_as(addr: int, dtype: Any) -> Any:
    """Return the item of `dtype` at `addr`. Acquire, device scope: later accesses of this thread stay after it."""
    return current().load_acquire_as(addr, dtype)


def load_passing_as(addr: int, dtype: Any) -> Any:
    """Return the item of `dtype` at `addr`, as `load_acquire_as` does. A GPU evicts it from L2 before other data.

    This is for items of frames: they are far more data than the page words, which every access needs.
    """
    return current().load_acquire_as(addr, dtype)


def store_relaxed_as(addr: int, value: Any, dtype: Any) -> None:
    """Store `value` at `addr` as an item of `dtype`. Relaxed, device scope."""
    current().store_relaxed_as(addr, value, dtype)


def load_weak_as(addr: int, dtype: Any) -> Any:
    """Return the item of `dtype` at `addr`. Weak: no other thread may write the item concurrently."""
    return current().load_weak_as(addr, dtype)


def store_weak_as(addr: int, value: Any, dtype: Any) -> None:
    """Store `value` at `addr` as an item of `dtype`. Weak: no other thread may access the item concurrently."""
    current().store_weak_as(addr, value, dtype)


def fetch_add_as(addr: int, value: Any, dtype: Any) -> Any:
    """Add `value` to the item of `dtype` at `addr`; return the item that was there. Relaxed, device scope.

    `dtype` is an integer or a float of 4 or 8 bytes.
    """
    return current().fetch_add_as(addr, value, dtype)


def fetch_min_as(addr: int, value: Any, dtype: Any) -> Any:
    """Store the smaller of `value` and the item of `dtype` at `addr`; return the item that was there.

    Relaxed, device scope. `dtype` is an integer or a float of 4 or 8 bytes. Floats must not be negative or NaN.
    """
    return current().fetch_min_as(addr, value, dtype)


def fetch_or_as(addr: int, value: Any, dtype: Any) -> Any:
    """Set the bits of `value` in the item of `dtype` at `addr`; return the item that was there.

    Relaxed, device scope. `dtype` is an integer of 4 or 8 bytes.
    """
    return current().fetch_or_as(addr, value, dtype)


def bits_as(bits: int, dtype: Any) -> Any:
    """Return the low bytes of a 64-bit word as an item of `dtype`, with the same bits. No memory is accessed."""
    return current().bits_as(bits, dtype)


def as_bits(value: Any, dtype: Any) -> int:
    """Return the bits of `value`, converted to `dtype`, in the low end of a 64-bit word. No memory is accessed."""
    return current().as_bits(value, dtype)


def load_pair(addr: int) -> tuple[int, int]:
    """Return the two words at `addr`, a multiple of 16. Each is a relaxed load of device scope; both are one access."""
    return load_relaxed(addr, DEVICE), load_relaxed(addr + 8, DEVICE)


def store_pair(addr: int, first: int, second: int) -> None:
    """Store two words at `addr`, a multiple of 16. Each is a relaxed store of device scope; both are one access."""
    store_relaxed(addr, first, DEVICE)
    store_relaxed(addr + 8, second, DEVICE)


def items_at(addr: int, count: Any, dtype: Any) -> Any:
    """Return an array of the items of `dtype` at `addr`; `count` is their number, or a tuple: the array's shape.

    Weak: no other thread may write them concurrently.
    """
    return current().items_at(addr, count, dtype)


def items_of_array(array: Any, first: int, count: int) -> Any:
    """Return an array of `count` items of a C-contiguous NumPy or device array, from flat index `first`; unchecked."""
    return array.reshape(-1)[first : first + count]


def scratch(nbytes: int) -> int:
    """Return the address of memory of the calling thread, a multiple of 16, until its function ends (`cpu`, `interp`).

    `nbytes` is a constant.
    """
    return current().scratch(nbytes)


def copy_foreign(dst: int, src: int, nbytes: int) -> None:
    """Copy `nbytes` bytes, a multiple of 8, from or to memory that other threads may access concurrently.

    Both addresses are multiples of 8. The accesses are relaxed, and of any width, so on `cpu` a copied word may be
    torn. The compiler does not know that this is a copy, so it does not repeat or move the loads; fences order them.
    """
    current().copy_bytes(dst, src, nbytes)


def copy_wide(dst: int, src: int, stride: int, count: int) -> None:
    """Copy `count` (1 to 4) pieces of 16 bytes from `src` to `dst`; at both, pieces begin every `stride` bytes.

    Both addresses are multiples of 16. Each 8-byte half is a relaxed access of system scope. All loads are issued
    before the first store, so that their latencies overlap.
    """
    current().copy_wide(dst, src, stride, count)


# -- warps: on `cpu` and `interp` a warp has one lane -------------------------------------------------------


def lane_id() -> int:
    """Return the position of the calling thread in its warp, from 0."""
    current()  # raises outside of a launch
    return 0


def warp_size() -> int:
    """Return the number of lanes of a warp: 32 on `cuda`, 1 elsewhere."""
    current()
    return 1


def activemask() -> int:
    """Return the lanes that run converged with the caller, its own included, as a bit mask. Orders nothing.

    If you need all lanes of a warp, call this at the very beginning of the kernel, or use ``ballot(mask, True)`` with
    lanes that are known to arrive: lanes that have diverged may stay diverged, even after `syncwarp`.
    """
    current()
    return 1


def ballot(mask: int, predicate: bool) -> int:
    """Return the lanes of `mask` whose `predicate` holds, as a bit mask. All lanes of mask call it. Orders nothing."""
    current()
    return int(bool(mask & 1 and predicate))


def any_sync(mask: int, predicate: bool) -> bool:
    """Return True if `predicate` holds in any lane of `mask`. All lanes of mask call it. Orders nothing."""
    return ballot(mask, predicate) != 0


def shfl(mask: int, value: int, lane: int) -> int:
    """Return the 64-bit `value` that lane number `lane` of the warp passed. Orders nothing.

    All lanes of mask call it, and `lane` must be one of them.
    """
    current()
    return value


def shfl_as(mask: int, value: Any, lane: int) -> Any:
    """Return the number of any type that lane number `lane` of the warp passed. Orders nothing.

    All lanes of mask call it, and `lane` must be one of them.
    """
    return value


def match_any(mask: int, value: int) -> int:
    """Return the lanes of `mask` that passed the same `value`. All lanes of mask call it. Orders nothing."""
    return activemask()


def syncwarp(mask: int) -> None:
    """Wait until all lanes of mask have called it.

    Accesses of these lanes before the call are ordered before accesses of all of these lanes after it. On a GPU, lanes
    that diverged before the call converge for this instruction only.
    """
    current()


@device
def reduce_warp(f: Any, value: Any) -> Any:
    """Return the values of all lanes of the warp, combined by `f`. All lanes that are still in the kernel call it.

    All lanes get the same result. Orders nothing. On `cpu` and `interp` the result is the caller's own `value`.

    Parameters
    ----------
    f : device function
        ``f(a, b)``, associative and commutative, such as `operator.add`. Its result has the type of `value`.
    value : number
    """
    mask = ballot(0xFFFFFFFF, True)
    if mask == 0xFFFFFFFF:
        lane = lane_id()
        for k in range(5):
            value = f(value, shfl_as(mask, value, lane ^ (1 << k)))
        return value
    remaining = mask & (mask - 1)
    total = shfl_as(mask, value, ffs(mask) - 1)
    while remaining != 0:
        total = f(total, shfl_as(mask, value, ffs(remaining) - 1))
        remaining &= remaining - 1
    return total


def popc(value: int) -> int:
    """Return the number of bits that are set in a 64-bit word."""
    return int(value & 0xFFFFFFFFFFFFFFFF).bit_count()


def ffs(value: int) -> int:
    """Return the position of the lowest bit that is set in a 64-bit word, from 1; 0 if no bit is set."""
    return (value & -value).bit_length()


# -- where and when a thread runs ---------------------------------------------------------------------------


def grid(ndim: int) -> Any:
    """Return the index of the calling thread in the launch: an integer for one dimension, a tuple for two or three.

    `ndim` is a constant, and the number of the launch's dimensions.
    """
    return current().grid(ndim)


def launch_flag() -> int:
    """Return the address of the flag of the calling thread's launch, which `failed` reads.

    On `cuda` this is the flag of all kernels that Warpwell did not launch; `block.own_flag` is the flag of a launch.
    """
    return int(current().flag.address)


def interrupted() -> int:
    """Return 1 if Ctrl-C ended the calling thread's launch, else 0. A relaxed load.

    On `cuda` the result is always 0, because the launch's flag has this information there.
    """
    return current().interrupted()


@device
def failed() -> bool:
    """Return True if an access of this launch to an array has failed, or Ctrl-C ended the launch.

    A loop that waits for something should call this, and return if it is true. The call is one relaxed load of host
    memory, so on a GPU, call it only once in many iterations. In a kernel of ``@cuda.jit`` it covers all such kernels
    of the process.
    """
    return load_relaxed(launch_flag(), SYSTEM) != 0 or interrupted() != 0


def clock_ns() -> int:
    """Return a time in nanoseconds that never goes back; on `interp`, logical time."""
    return current().clock_ns()


def backoff(attempt: int) -> None:
    """Wait a little: longer with each `attempt` (0, 1, 2, ...), up to about a millisecond. Orders nothing."""
    current().backoff(attempt)


def rem(a: int, b: int) -> int:
    """Return ``a % b``. `a` must not be negative and `b` must be positive: neither is checked."""
    return a % b


def div(a: int, b: int) -> int:
    """Return ``a // b``. `a` must not be negative and `b` must be positive: neither is checked."""
    return a // b


# -- native host code only: service threads, never a GPU. Accesses are weak. ----------------------------------


def copy_bytes(dst: int, src: int, nbytes: int) -> None:
    """Copy `nbytes` bytes from `src` to `dst`, which do not overlap (`cpu`, `interp`)."""
    current().copy_bytes(dst, src, nbytes)


def crc32c(address: int, nbytes: int, seed: int) -> int:
    """Return the CRC-32C (0 to 2**32 - 1) of `nbytes` bytes at `address` (`cpu`, `interp`).

    `seed` is the CRC of the bytes before them, 0 at the start.
    """
    return current().crc32c(address, nbytes, seed)


def copy_crc32c(dst: int, src: int, nbytes: int, seed: int) -> int:
    """Copy bytes as `copy_bytes` does and return their CRC as `crc32c` does (`cpu`, `interp`).

    If the source changes concurrently, this is the CRC of the copy.
    """
    copy_bytes(dst, src, nbytes)
    return crc32c(dst, nbytes, seed)


def prefetch(address: int) -> None:
    """Begin to load the cache line at `address`, which may be any number (`cpu`; does nothing on `interp`)."""


def guarded_ranges() -> int:
    """Return the address of the table of mapped files that are guarded (compiled host code; see `bus_error`)."""
    raise RuntimeError("guarded_ranges is compiled host code")


def own_launch_flag() -> int:
    """Return the address of the flag of the launch whose thread this is, or 0 in other threads (compiled host code)."""
    raise RuntimeError("own_launch_flag is compiled host code")


def seat() -> int:
    """Return the word that the calling service thread stored with `take_seat`, or 0 (`cpu`, `interp`).

    On `interp` it is the thread's number.
    """
    return current().seat()


def take_seat(value: int) -> None:
    """Store a word for the calling thread, for `seat`; initially 0 (compiled host code)."""
    raise RuntimeError("take_seat is compiled host code")


def pread(fd: int, address: int, nbytes: int, offset: int) -> int:
    """Read `nbytes` bytes at `offset` of the file descriptor `fd` to `address` (`cpu`, `interp`).

    Return the number of bytes read, or minus ``errno``.
    """
    return current().pread(fd, address, nbytes, offset)


def pwrite(fd: int, address: int, nbytes: int, offset: int) -> int:
    """Write `nbytes` bytes at `address` to `offset` of the file descriptor `fd` (`cpu`, `interp`).

    Return the number of bytes written, or minus ``errno``.
    """
    return current().pwrite(fd, address, nbytes, offset)


def call_native(function: int, state: int, a: int, b: int, c: int, d: int, e: int) -> int:
    """Call the native function (`targets.native`) at the address `function` with its `state` and at most five words.

    Words beyond the parameters of the function are ignored.
    """
    return current().call_native(function, state, a, b, c, d, e)


def call_foreign(function: int, a: int, b: int, c: int, d: int, e: int, f: int, g: int) -> int:
    """Call the C function at the address `function`, which takes at most seven integers and pointers (`cpu`).

    Arguments beyond the function's parameters are ignored. If the function returns an ``int``, use only the lower 32
    bits of the result.
    """
    return int(ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 7)(function)(a, b, c, d, e, f, g))


def call_cold(function: Any, *args: Any) -> Any:
    """Call a device function without inlining it.

    So a rare path costs its caller no registers and no code.
    """
    return function(*args)


def element_address(array: Any, index: Any) -> int:
    """Return the address of the item of a NumPy or device array at an index.

    The index must be in range and not negative. Compiled code checks this only in launches with bounds checks; `interp`
    always checks it.
    """
    position = index if isinstance(index, tuple) else (index,)
    for i, extent in zip(position, array.shape, strict=True):
        if not 0 <= i < extent:
            kernel, name = getattr(array, "origin", None) or ("?", "?")
            raise out_of_range(kernel, name, int(i), extent)
    return int(array.ctypes.data + sum(int(i) * s for i, s in zip(position, array.strides, strict=True)))


# -- blocks ------------------------------------------------------------------------------------------------------


def block_index() -> int:
    """Return the index of the calling thread's block in the launch."""
    return int(current().grid(1))


def thread_index() -> int:
    """Return the index of the calling thread in its block."""
    current()
    return 0


def block_threads() -> int:
    """Return the number of threads of a block."""
    current()
    return 1


def barrier() -> None:
    """Wait until all threads of the block have called it. All threads of the block call it.

    Accesses of these threads before the barrier are ordered before accesses of all of these threads after it. A
    scheduler can preempt a kernel between blocks only if no thread can return before a barrier that other threads
    reach. The scheduler runs any other kernel unmodified.
    """
    current()


def shared_array(shape: Any, dtype: Any) -> Any:
    """Return an array that the threads of a block share. All threads of the block call it.

    `shape` and `dtype` are constants. The items are not set, and are lost when the block ends.
    """
    current()
    return np.empty(shape, dtype)


# -- for generated launch code alone ---------------------------------------------------------------------------


def virtual_grid(ndim: int) -> Any:
    """Return `grid` of the block that the workers of a launch have claimed."""
    return grid(ndim)


def virtual_block_index() -> int:
    """Return `block_index` of the block that the workers of a launch have claimed."""
    return block_index()


def set_virtual(x: int, y: int, z: int) -> None:
    """Make (x, y, z) the block's index for the calling warp. All lanes of the warp call it, together.

    Each warp keeps its own index, so no warp waits for another.
    """
    raise RuntimeError("set_virtual is compiled launch code")


def set_flag(address: int) -> None:
    """Set the address of the launch's flag. All threads of the block call it, with the same address."""
    raise RuntimeError("set_flag is compiled launch code")


def own_flag() -> int:
    """Return the address of the launch's flag, in a kernel on a GPU that began with `set_flag`."""
    raise RuntimeError("own_flag is compiled launch code")


@device
def launch_failed() -> bool:
    """Replace `failed` in a kernel that Warpwell launches on a GPU (see `virtual.launch_copy`)."""
    return load_relaxed(own_flag(), SYSTEM) != 0


def has_sizes(value: Any) -> None:
    """Let the compiler know that the lengths of an array are not negative. No effect for other values.

    An index that is computed from these lengths is then known not to be negative, and is not checked for that.
    """
    raise RuntimeError("has_sizes is compiled launch code")


def opaque(value: Any, turn: int) -> Any:
    """Return `value`, but hide it from the compiler, for which it may be a different one at each `turn` of a loop.

    This is for a kernel's floating-point arguments in a loop over blocks. Without it, the compiler would move
    expressions of arguments alone out of the loop, where a product is not fused with the sum that it belongs to, and
    the loop would round differently from the unmodified kernel.
    """
    raise RuntimeError("opaque is compiled launch code")


def div_short(a: int, b: int) -> int:
    """Return ``a // b`` of numbers from 0 to 2^32 - 1, in a third of the instructions of a division of words."""
    raise RuntimeError("div_short is compiled launch code")


def put_claim(value: int) -> None:
    """Store a word for all threads of the block. One thread calls it, and a barrier must follow."""
    raise RuntimeError("put_claim is compiled launch code")


def get_claim() -> int:
    """Return the word that `put_claim` has stored, after a barrier."""
    raise RuntimeError("get_claim is compiled launch code")
