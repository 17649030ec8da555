"""`Interpreter`: device code as plain Python, one seeded interleaving on weak memory for each run.

Every shared access is a point where the scheduler may run another thread, and a load may return any value that
coherence and happens-before permit, so a missing fence or recheck fails here, although the code may work on most
hardware.  A failing seed replays exactly. The meaning of the primitives is documented in ``primitives.py``.
"""

from __future__ import annotations

import ctypes
import functools
import math
import operator
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ..checksum import crc32c_of
from ..fault import LaunchFlag
from .threads import NS_PER_STEP, Interleaver
from .weak_memory import ORDERED, RELAXED, WEAK, WeakMemory

_local = threading.local()

M64 = (1 << 64) - 1
_S63 = 1 << 63
_NATIVE = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 6)

native_functions: dict[int, Callable[..., int]] = {}
"""The plain Python function for each native address."""


def i64(value: int) -> int:
    """Wrap an integer to signed 64 bits, as compiled code does by itself."""
    return ((int(value) + _S63) & M64) - _S63


class ItemCodec:
    """Turns the bits of an item into the scalar that device code computes with, and back.

    Parameters
    ----------
    dtype : numpy.dtype or type
        Fixed-size little-endian type of 1, 2, 4 or 8 bytes; another is a TypeError.

    Notes
    -----
    Integers and booleans become Python's (device code computes in int64), float64 becomes a Python float, and
    all others a NumPy scalar, so that float32 arithmetic rounds as it does in compiled code.
    """

    __slots__ = ("_plain", "dtype", "mask", "sign", "size")

    def __init__(self, dtype: Any) -> None:
        self.dtype = np.dtype(dtype)
        self.size: int = self.dtype.itemsize
        if self.size not in (1, 2, 4, 8):
            raise TypeError(f"items of {self.dtype} have {self.size} bytes; device accesses take 1, 2, 4 or 8")
        self.mask: int = (1 << 8 * self.size) - 1
        self.sign = 1 << (8 * self.size - 1) if self.dtype.kind == "i" else 0
        self._plain = self.dtype.kind in "iu"

    def decode(self, bits: int) -> Any:
        """Scalar of the unsigned number `bits`."""
        if self._plain:
            return (bits ^ self.sign) - self.sign
        value: Any = np.frombuffer(bits.to_bytes(self.size, "little"), self.dtype)[0]
        return value.item() if self.dtype.kind == "b" or self.dtype == np.float64 else value

    def encode(self, value: Any) -> int:
        """Bits of `value`, as an unsigned number; integers wrap."""
        if self._plain:
            return int(value) & self.mask
        with np.errstate(all="ignore"):  # compiled code rounds to infinity without a warning
            data: bytes = np.asarray(value).astype(self.dtype).tobytes()
        return int.from_bytes(data, "little")


class Scratch(int):
    """The address of memory that is reused when this number is deleted.

    Not by NumPy's allocator: which thread has memory of another before it would depend on what a process did before,
    and a seed would not decide everything.
    """

    buffer: np.ndarray
    free: list[np.ndarray]

    def __del__(self) -> None:
        self.free.append(self.buffer)


class ItemsAt:
    """An array of items at an address, whose accesses are weak."""

    def __init__(self, run: Interpreter, address: int, shape: tuple[int, ...], dtype: Any) -> None:
        self._run = run
        self._address = address
        self._dtype = dtype
        self._size = item_codec(dtype).size
        self.shape = shape
        self.size = math.prod(shape)

    def __len__(self) -> int:
        return self.shape[0]

    def _address_of(self, index: int | tuple[int, ...]) -> int:
        position = 0
        for extent, k in zip(self.shape, index if isinstance(index, tuple) else (index,), strict=True):
            position = position * extent + k
        return self._address + position * self._size

    def __getitem__(self, index: int | tuple[int, ...]) -> Any:
        return self._run.load_weak_as(self._address_of(index), self._dtype)

    def __setitem__(self, index: int | tuple[int, ...], value: Any) -> None:
        self._run.store_weak_as(self._address_of(index), value, self._dtype)


@functools.lru_cache(maxsize=256)
def item_codec(dtype: Any) -> ItemCodec:
    """The codec of `dtype`."""
    return ItemCodec(dtype)


def current() -> Interpreter:
    """Return the interpreter that runs the calling device code.

    Raises RuntimeError if device code was called as a Python function, outside of a launch.
    """
    try:
        running: Interpreter = _local.running
    except AttributeError:
        raise RuntimeError("device code was called outside of a launch; launch a kernel with it instead") from None
    return running


class Interpreter(Interleaver):
    """Runs device functions as greenlets on weak memory; its methods are the primitives of device code.

    Parameters
    ----------
    seed : int
        Decides every choice.
    max_steps : int
        As for `Interleaver`.
    coarse_copies : bool
        One switch point for each copy instead of one for each 8-byte word; the values stay weak.
    trace : int
        Number of last accesses to keep (0: none); they are added to an exception's notes.
    flag : LaunchFlag, optional
        The flag that `warpwell.gpu.failed` reads.
    """

    def __init__(
        self,
        seed: int,
        *,
        max_steps: int = 1_000_000,
        coarse_copies: bool = False,
        trace: int = 0,
        flag: LaunchFlag | None = None,
    ) -> None:
        super().__init__(seed, max_steps=max_steps)
        self.memory = WeakMemory(self.random, self.random.choice((0.9, 0.7, 0.7, 0.4)))
        self.coarse_copies = coarse_copies
        self.flag = flag or LaunchFlag("interp")
        self.shape: tuple[int, ...] = (0,)
        self._scratch: dict[int, list[np.ndarray]] = {}
        self._trace: deque[tuple[int, str, str, int, Any]] | None = deque(maxlen=trace) if trace else None

    @property
    def trace_hash(self) -> int:
        """Hash of all accesses so far: thread, word and which of its values; no addresses."""
        return hash((self.memory.digest, self.steps, self.skipped))

    def announce(self, address: int, nbytes: int) -> None:
        """Register a range as memory; from then on, an access outside of all ranges is a ValueError, not a crash."""
        self.memory.ranges.append((int(address), int(address) + nbytes))

    def run(self) -> None:
        """Run until all threads but the daemons have ended.

        An exception of a thread ends the run; its notes name seed, step and thread.  `InterpStallError` after
        `max_steps`.  Threads see all stores of host code before the run, and during the run only those of
        `write_bytes`.
        """
        if getattr(_local, "running", None) is not None:
            raise RuntimeError("device code cannot start another interpreted launch")
        if self.shape == (0,):
            self.shape = (sum(not t.daemon for t in self.threads),)
        self.memory.forget()
        _local.running = self
        try:
            self._run()
        except BaseException as error:
            if self._trace:
                error.add_note("interp: last accesses\n" + self.format_trace())
            raise
        finally:
            del _local.running
            self.memory.forget()
            self.shape = (0,)

    def format_trace(self) -> str:
        """The kept accesses, one a line: step, thread, access, address, value."""
        return "\n".join(f"  {s:8d} {t:20s} {op:18s} {a:#x} {v}" for s, t, op, a, v in self._trace or ())

    # -- launches ----------------------------------------------------------------------------------------------

    def launch(
        self,
        fn: Callable[..., object],
        n: int | tuple[int, ...],
        args: Sequence[Any] = (),
        *,
        live: int = 64,
        services: Sequence[Callable[[], object]] = (),
    ) -> None:
        """Call ``fn(*args)`` in as many logical threads as `n` says, at most `live` of them at a time.

        `n` is a count or a shape of up to 3 extents.  The `services` run concurrently until all threads have ended:
        each is called repeatedly, with back-off if it returns None or 0 (it found no work). A logical thread starts
        when another one has ended, and inherits its knowledge of memory.
        """
        shape = (n,) if isinstance(n, int) else tuple(n)
        if not 1 <= len(shape) <= 3 or min(shape) < 0:
            raise ValueError(f"launch shape {shape}: 1 to 3 extents, none negative")
        self.shape = shape
        total = math.prod(shape)
        indices = iter(range(total))
        for slot in range(min(live, total)):
            self.spawn(self._logical, fn, args, indices, name=f"{getattr(fn, '__name__', 'thread')}[{slot}]")
        for step in services:
            self.spawn(self._serve, step, name=getattr(step, "__name__", "service"), daemon=True)
        self.run()

    def _serve(self, step: Callable[[], object]) -> None:
        attempt = 0
        thread = self.thread
        while not self._ending:
            # A step that began is also finished: half a step would leave a ring or a lock unusable.
            thread.busy = True
            worked = step()
            thread.busy = False
            attempt = 0 if worked else attempt + 1
            self.backoff(attempt)

    def _logical(self, fn: Callable[..., object], args: Sequence[Any], indices: Iterator[int]) -> None:
        name = getattr(fn, "__name__", "thread")
        for index in indices:
            if self.flag.interrupted:
                return
            self.thread.index = index
            self.thread.name = f"{name}[{index}]"
            fn(*args)

    def _log(self, op: str, address: int, value: Any) -> None:
        if self._trace is not None:
            self._trace.append((self.steps, self.thread.name, op, address, value))

    # -- 64-bit words ------------------------------------------------------------------------------------------

    def load_relaxed(self, addr: int, scope: int) -> int:
        return self._load(addr, scope, RELAXED)

    def load_acquire(self, addr: int, scope: int) -> int:
        return self._load(addr, scope, ORDERED)

    def store_relaxed(self, addr: int, value: int, scope: int) -> None:
        self._store(addr, value, scope, RELAXED)

    def store_release(self, addr: int, value: int, scope: int) -> None:
        self._store(addr, value, scope, ORDERED)

    def _load(self, addr: int, scope: int, order: int) -> int:
        self._check(scope)
        self.steps += 1
        if self.steps >= self._next_switch:
            self._switch()
        value = self.memory.load(self.thread.view, addr, order)
        if self._trace is not None:
            self._log("load" if order == RELAXED else "load acquire", addr, value)
        return value

    def _store(self, addr: int, value: int, scope: int, order: int) -> None:
        self._check(scope)
        self._point()
        value = i64(value)
        self.memory.store(self.thread.view, addr, value, order)
        if self._trace is not None:
            self._log("store" if order == RELAXED else "store release", addr, value)

    @staticmethod
    def _check(scope: int) -> None:
        if scope not in (0, 1, 2):
            raise ValueError(f"scope is {scope!r}, not BLOCK, DEVICE or SYSTEM (0, 1, 2)")

    def _begin(self, addr: int, scope: int) -> int:
        self._check(scope)
        self._point()
        return self.memory.load(self.thread.view, addr, ORDERED, newest=True)

    def _finish(self, op: str, addr: int, old: int, value: int, order: int = ORDERED) -> int:
        # No switch point since _begin: the two are one atomic step.
        self.memory.store(self.thread.view, addr, i64(value), order, continues=order == RELAXED)
        if self._trace is not None:
            self._log(op, addr, (old, i64(value)))
        return old

    def exchange(self, addr: int, value: int, scope: int) -> int:
        return self._finish("exchange", addr, self._begin(addr, scope), value)

    def compare_exchange(self, addr: int, expected: int, desired: int, scope: int) -> int:
        old = self._begin(addr, scope)
        if old == i64(expected):
            return self._finish("compare_exchange", addr, old, desired)
        self._log("cas failed", addr, old)
        return old

    def compare_exchange_acquire(self, addr: int, expected: int, desired: int, scope: int) -> int:
        old = self._begin(addr, scope)
        if old == i64(expected):
            return self._finish("compare_exchange_acquire", addr, old, desired, RELAXED)
        self._log("cas failed", addr, old)
        return old

    def fetch_add(self, addr: int, v: int, scope: int) -> int:
        old = self._begin(addr, scope)
        return self._finish("fetch_add", addr, old, old + int(v))

    def fetch_or(self, addr: int, v: int, scope: int) -> int:
        old = self._begin(addr, scope)
        return self._finish("fetch_or", addr, old, old | int(v))

    def fetch_and(self, addr: int, v: int, scope: int) -> int:
        old = self._begin(addr, scope)
        return self._finish("fetch_and", addr, old, old & int(v))

    def fence(self, scope: int) -> None:
        self._check(scope)
        self._point()
        self.thread.view.fence()

    # items

    def load_relaxed_as(self, addr: int, dt: Any) -> Any:
        return self._load_item(addr, dt, RELAXED)

    def load_acquire_as(self, addr: int, dt: Any) -> Any:
        return self._load_item(addr, dt, ORDERED)

    def load_weak_as(self, addr: int, dt: Any) -> Any:
        return self._load_item(addr, dt, WEAK)

    def store_relaxed_as(self, addr: int, value: Any, dt: Any) -> None:
        self._store_item(addr, value, dt, RELAXED)

    def store_weak_as(self, addr: int, value: Any, dt: Any) -> None:
        self._store_item(addr, value, dt, WEAK)

    def _load_item(self, addr: int, dt: Any, order: int) -> Any:
        value = self._get(addr, item_codec(dt), order)
        self._log(("load weak", "load", "load acquire")[order], addr, value)
        return value

    def _get(self, addr: int, codec: ItemCodec, order: int, *, newest: bool = False) -> Any:
        if addr & (codec.size - 1):
            raise ValueError(f"misaligned access: address {addr:#x} of an item of {codec.size} bytes")
        self._point()
        word = self.memory.load(self.thread.view, addr & ~7, order, newest)
        return codec.decode((word >> 8 * (addr & 7)) & codec.mask)

    def _store_item(self, addr: int, value: Any, dt: Any, order: int) -> None:
        codec = item_codec(dt)
        self._point()
        self._put(addr, codec.size, codec.encode(value), order)
        self._log("store" if order else "store weak", addr, value)

    def _put(self, addr: int, size: int, bits: int, order: int, *, continues: bool = False) -> None:
        if size == 8:
            self.memory.store(self.thread.view, addr, i64(bits), order, continues)
        else:
            self.memory.store_part(self.thread.view, int(addr), size, bits, order)

    def fetch_add_as(self, addr: int, value: Any, dt: Any) -> Any:
        return self._update_item("fetch_add", addr, value, dt, "iuf", operator.add)

    def fetch_min_as(self, addr: int, value: Any, dt: Any) -> Any:
        return self._update_item("fetch_min", addr, value, dt, "iuf", min)

    def fetch_or_as(self, addr: int, value: Any, dt: Any) -> Any:
        return self._update_item("fetch_or", addr, value, dt, "iu", operator.or_)

    def _update_item(
        self, name: str, addr: int, value: Any, dt: Any, kinds: str, operation: Callable[[Any, Any], Any]
    ) -> Any:
        codec = item_codec(dt)
        if codec.size < 4 or codec.dtype.kind not in kinds:
            raise TypeError(f"atomic {name} on {codec.dtype}: only 4- and 8-byte items of kinds {kinds} have it")
        old = self._get(addr, codec, RELAXED, newest=True)
        with np.errstate(all="ignore"):
            bits = codec.encode(operation(old, codec.decode(codec.encode(value))))
        self._put(addr, codec.size, bits, RELAXED, continues=True)
        self._log(f"{name} relaxed", addr, (old, value))
        return old

    def bits_as(self, bits: int, dt: Any) -> Any:
        codec = item_codec(dt)
        return codec.decode(int(bits) & codec.mask)

    def as_bits(self, value: Any, dt: Any) -> int:
        return i64(item_codec(dt).encode(value))

    # -- copies and native calls -------------------------------------------------------------------------------

    def copy_wide(self, dst: int, src: int, stride: int, count: int) -> None:
        if not 1 <= count <= 4:
            raise ValueError(f"copy_wide of {count} pieces: 1 to 4")
        if (dst | src) & 15 or stride & 15:
            raise ValueError(f"copy_wide from {src:#x} to {dst:#x}, stride {stride}: not multiples of 16")
        offsets = [k * stride + half for k in range(count) for half in (0, 8)]
        self._copy_words(dst, src, offsets)

    def _copy_words(self, dst: int, src: int, offsets: Sequence[int]) -> None:
        memory, fine = self.memory, not self.coarse_copies
        if not fine:
            self._point()
        values = []
        for offset in offsets:
            if fine:
                self._point()
            values.append(memory.load(self.thread.view, src + offset, RELAXED))
        for offset, value in zip(offsets, values, strict=True):
            if fine:
                self._point()
            memory.store(self.thread.view, dst + offset, value, RELAXED)
        self._log(f"copy {8 * len(offsets)} B", dst, f"from {src:#x}")

    def items_at(self, addr: int, count: int | tuple[int, ...], dt: Any) -> ItemsAt:
        return ItemsAt(self, int(addr), count if isinstance(count, tuple) else (count,), dt)

    def scratch(self, nbytes: int) -> Scratch:
        free = self._scratch.setdefault(nbytes, [])
        used = bool(free)
        buffer = free.pop() if used else np.zeros(nbytes // 8 + 2, np.int64)
        scratch = Scratch(-(-buffer.ctypes.data // 16) * 16)
        scratch.buffer, scratch.free = buffer, free
        if self.memory.ranges and not used:
            self.announce(scratch, nbytes)
        return scratch

    def copy_bytes(self, dst: int, src: int, nbytes: int) -> None:
        if not (dst | src | nbytes) & 7:
            # Copy 64 bytes at a time, like memcpy: other threads may see a partial copy.
            for start in range(0, nbytes, 64):
                self._copy_words(dst + start, src + start, range(0, min(64, nbytes - start), 8))
        else:
            self.write_bytes(dst, self.read_bytes(src, nbytes))

    def read_bytes(self, addr: int, nbytes: int) -> bytes:
        """Read `nbytes` bytes by relaxed loads; also for Python code that serves a run."""
        out = bytearray()
        first, end = addr & ~7, addr + nbytes
        for word in range(first, end, 8):
            if word == first or not self.coarse_copies:
                self._point()
            out += (self.memory.load(self.thread.view, word, RELAXED) & M64).to_bytes(8, "little")
        return bytes(out[addr - first : end - first])

    def write_bytes(self, addr: int, data: bytes) -> None:
        """Write `data` by relaxed stores of up to 8 bytes; also for Python code that serves a run."""
        position, end = addr, addr + len(data)
        while position < end:
            size = 8
            while position % size or position + size > end:
                size //= 2
            if position == addr or not self.coarse_copies:
                self._point()
            offset = position - addr
            self._put(position, size, int.from_bytes(data[offset : offset + size], "little"), RELAXED)
            position += size
        self._log(f"write {len(data)} B", addr, "")

    def crc32c(self, address: int, nbytes: int, seed: int) -> int:
        return crc32c_of(self.read_bytes(address, nbytes), seed)

    def pread(self, fd: int, buf: int, n: int, offset: int) -> int:
        try:
            data = os.pread(fd, n, offset)
        except OSError as error:
            return -(error.errno or 5)
        self.write_bytes(buf, data)
        return len(data)

    def pwrite(self, fd: int, buf: int, n: int, offset: int) -> int:
        data = self.read_bytes(buf, n)
        try:
            return os.pwrite(fd, data, offset)
        except OSError as error:
            return -(error.errno or 5)

    def call_native(self, address: int, state: int, a: int, b: int, c: int, d: int, e: int) -> int:
        function = native_functions.get(int(address))
        if function is None:
            return int(_NATIVE(int(address))(state, a, b, c, d, e))
        count = function.__code__.co_argcount  # a C function ignores the others
        return i64(function(*(state, a, b, c, d, e)[:count]))

    # -- where and when a thread runs --------------------------------------------------------------------------

    def backoff(self, attempt: int) -> None:
        self._pause(0 if attempt <= 0 else min(4 << min(int(attempt), 6), 256))

    def clock_ns(self) -> int:
        self._point()
        return self.now * NS_PER_STEP

    def seat(self) -> int:
        return int(self.thread.index)

    def interrupted(self) -> int:
        return int(self.flag.interrupted)

    def grid(self, ndim: int) -> Any:
        if ndim == 1:
            return self.thread.index
        if ndim not in (2, 3) or len(self.shape) > ndim:
            raise ValueError(f"grid({ndim}) in a launch of shape {self.shape}")
        return tuple(map(int, np.unravel_index(self.thread.index, (*self.shape, 1, 1)[:ndim])))


def launch(
    fn: Callable[..., object],
    n: int | tuple[int, ...],
    args: Sequence[Any] = (),
    seed: int = 0,
    *,
    live: int = 64,
    services: Sequence[Callable[[], object]] = (),
    **options: Any,
) -> Interpreter:
    """Launch `fn` on a new `Interpreter` made with `seed` and `options`, and return it when all is done."""
    interpreter = Interpreter(seed, **options)
    interpreter.launch(fn, n, args, live=live, services=services)
    return interpreter
