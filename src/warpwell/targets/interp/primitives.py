"""Copies, native calls, time and warps as the ``interp`` target runs them; ``atomics.py`` documents them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from typing import Any

from warpwell.targets.checksum import crc32c_of
from warpwell.targets.interp.accesses import M64, Accesses, i64
from warpwell.targets.interp.threads import NS_PER_STEP
from warpwell.targets.interp.weak_memory import RELAXED

_NATIVE = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 6)
_natives: list[Callable[..., int]] = []
_handles: dict[Callable[..., int], int] = {}


def native_handle(fn: Callable[..., int]) -> int:
    if fn not in _handles:
        _natives.append(fn)
        _handles[fn] = -len(_natives)
    return _handles[fn]


class Primitives(Accesses):
    flag: Any

    # copies

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

    def copy_bytes(self, dst: int, src: int, nbytes: int) -> None:
        if not (dst | src | nbytes) & 7:
            # Pieces of 64 bytes, as memcpy has them: other threads see a copy half done.
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
        if address < 0:
            return i64(_natives[-address - 1](state, a, b, c, d, e))
        from warpwell.targets.native import python_of

        try:
            fn = python_of(int(address))
        except KeyError:
            return int(_NATIVE(int(address))(state, a, b, c, d, e))
        return i64(fn(state, a, b, c, d, e))

    # threads, time, warps of one lane

    def backoff(self, attempt: int) -> None:
        self._pause(0 if attempt <= 0 else min(4 << min(int(attempt), 6), 256))

    def clock_ns(self) -> int:
        self._point()
        return self.now * NS_PER_STEP

    def interrupted(self) -> int:
        return int(self.flag.interrupted)

    def grid(self, ndim: int) -> Any:
        return self._unravel(self.thread.index, ndim)

    def gridsize(self, ndim: int) -> Any:
        if ndim == 1:
            total = 1
            for extent in self.shape:
                total *= extent
            return total
        return (*self.shape, 1, 1)[:ndim]

    def _unravel(self, index: int, ndim: int) -> Any:
        if ndim == 1:
            return index
        if ndim not in (2, 3) or len(self.shape) > ndim:
            raise ValueError(f"grid({ndim}) in a launch of shape {self.shape}")
        # C order, as on the other targets: the last coordinate changes fastest.
        extents = (*self.shape, 1, 1)
        parts: list[int] = []
        for extent in extents[ndim - 1 : 0 : -1]:
            index, part = divmod(index, extent)
            parts.append(part)
        return (index, *reversed(parts))

    def lane_id(self) -> int:
        return 0

    def warp_size(self) -> int:
        return 1

    def activemask(self) -> int:
        return 1

    def ballot(self, mask: int, pred: Any) -> int:
        return 1 if mask & 1 and pred else 0

    def any_sync(self, mask: int, pred: Any) -> bool:
        return bool(mask & 1 and pred)

    def shfl(self, mask: int, value: int, lane: int) -> int:
        return value

    def syncwarp(self, mask: int) -> None:
        return None

    def popc(self, m: int) -> int:
        return (int(m) & M64).bit_count()

    def ffs(self, m: int) -> int:
        bits = int(m) & M64
        return (bits & -bits).bit_length()

    def i64(self, x: int) -> int:
        return i64(x)
