"""Accesses to words and items as the ``interp`` target runs them; ``atomics.py`` documents them."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from warpwell.targets.interp.items import item_codec
from warpwell.targets.interp.threads import Scheduler
from warpwell.targets.interp.weak_memory import ORDERED, RELAXED, WEAK, WeakMemory

M64 = (1 << 64) - 1
_S63 = 1 << 63


def i64(x: int) -> int:
    return ((int(x) + _S63) & M64) - _S63


class Accesses(Scheduler):
    def __init__(
        self, seed: int, switch_probability: float | None, max_steps: int, fresh: float | None, trace: int
    ) -> None:
        super().__init__(seed, switch_probability=switch_probability, max_steps=max_steps)
        drawn = self.random.choice((0.9, 0.7, 0.7, 0.4))
        self.memory = WeakMemory(self.random, drawn if fresh is None else fresh)
        self.coarse_copies = False
        self.shape: tuple[int, ...] = (0,)
        self._trace: deque[tuple[int, str, str, int, Any]] | None = deque(maxlen=trace) if trace else None

    def _log(self, op: str, address: int, value: Any) -> None:
        if self._trace is not None:
            self._trace.append((self.steps, self.thread.name, op, address, value))

    # 64-bit words

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
        return self.memory.newest(self.thread.view, addr, ORDERED)

    def _finish(self, op: str, addr: int, old: int, value: int) -> int:
        # No switch point since _begin: the two are one atomic step.
        self.memory.store(self.thread.view, addr, i64(value), ORDERED)
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
        codec = item_codec(dt)
        if addr & (codec.size - 1):
            raise ValueError(f"misaligned access: address {addr:#x} of an item of {codec.size} bytes")
        self._point()
        word = self.memory.load(self.thread.view, addr & ~7, order)
        value = codec.decode((word >> 8 * (addr & 7)) & codec.mask)
        self._log(("load weak", "load", "load acquire")[order], addr, value)
        return value

    def _store_item(self, addr: int, value: Any, dt: Any, order: int) -> None:
        codec = item_codec(dt)
        self._point()
        self._put(addr, codec.size, codec.encode(value), order)
        self._log("store" if order else "store weak", addr, value)

    def _put(self, addr: int, size: int, bits: int, order: int) -> None:
        if size == 8:
            self.memory.store(self.thread.view, addr, i64(bits), order)
        else:
            self.memory.store_part(self.thread.view, int(addr), size, bits, order)

    def fetch_add_as(self, addr: int, value: Any, dt: Any) -> Any:
        codec = item_codec(dt)
        if codec.size < 4 or codec.dtype.kind not in "iuf":
            raise TypeError(f"atomic add on {codec.dtype}: only 4- and 8-byte integers and floats have it")
        if addr & (codec.size - 1):
            raise ValueError(f"misaligned access: address {addr:#x} of an item of {codec.size} bytes")
        self._point()
        view = self.thread.view
        word = self.memory.newest(view, addr & ~7, RELAXED)
        old = codec.decode((word >> 8 * (addr & 7)) & codec.mask)
        with np.errstate(all="ignore"):
            bits = codec.encode(old + codec.decode(codec.encode(value)))
        if codec.size == 8:
            self.memory.update(view, addr, i64(bits))
        else:
            self.memory.store_part(view, int(addr), codec.size, bits, RELAXED)
        self._log("fetch_add relaxed", addr, (old, value))
        return old

    def bits_as(self, bits: int, dt: Any) -> Any:
        codec = item_codec(dt)
        return codec.decode(int(bits) & codec.mask)

    def as_bits(self, value: Any, dt: Any) -> int:
        return i64(item_codec(dt).encode(value))
