"""Adversary: an interpreter that lets threads sleep at any access, and reports stores to a model."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Sequence
from typing import Any

from warpwell.targets import Block
from warpwell.targets.interp.interpreter import Interpreter, native_functions
from warpwell.targets.interp.threads import Thread

Watch = Callable[[int], None]

LONG = (6000, 12000, 24000)
"""Steps in which other threads advance a page through all generations."""
MIDDLE = (500, 1500, 3000)
"""Steps in which a page is evicted, and other threads write to the next page in its frame."""
SHORT = (10, 30, 90)
"""Steps in which one or two pages are loaded and evicted."""


@functools.cache
def native_handle(function: Callable[..., int]) -> int:
    """Return a handle for interpreted device code that calls a Python function as a native function."""
    handle = min([0, *native_functions]) - 1
    native_functions[handle] = function
    return handle


class Violation(AssertionError):
    """An invariant did not hold in an interleaving."""


class Adversary(Interpreter):
    """An `Interpreter` that provokes violations.

    In half of the seeds a thread sleeps, after any access, while other threads execute many operations. In some seeds
    it sleeps preferably after it has read a watched word. Operating systems do this to threads, but random switches
    alone rarely do.

    Parameters
    ----------
    seed : int
    max_steps : int
    trace : int
        As for `Interpreter`.
    nappers : int
        Number of leading threads that nap in every seed, often after they read a watched word; other threads never nap.
    naps : sequence of int
        Approximate lengths of these naps in steps; each nap draws one.

    Attributes
    ----------
    watched : dict of int to callable
        Called with the new value after each store to that word by a 64-bit access.
    """

    def __init__(
        self, seed: int, *, max_steps: int, trace: int = 0, nappers: int = 0, naps: Sequence[int] = LONG
    ) -> None:
        super().__init__(seed, max_steps=max_steps, coarse_copies=True, trace=trace)
        self.watched: dict[int, Watch] = {}
        self._every = self.random.choice((0, 0, 200, 1000))
        self._after_load = self.random.choice((0.0, 0.01, 0.05))
        self._lengths: Sequence[int] = (50, 500, 3000)
        self._nappers = nappers
        if nappers:
            # Only `nappers` sleep, while the remaining threads advance the generations.
            self._every, self._after_load, self._lengths = 0, 0.2, naps
        self._nap_at = self._next_nap() if self._every else 1 << 62

    def announce_blocks(self, *blocks: Block) -> None:
        """Register the blocks, and the launch's flag, as the only valid memory."""
        self.announce(self.flag.address, 16)
        for block in blocks:
            self.announce(block.address, block.nbytes)

    def _next_nap(self) -> int:
        return self.steps + 1 + int(self.random.random() * 2 * self._every)

    def _switch(self) -> None:
        thread = self.thread
        if self.steps >= self._nap_at and not (self._stopping or self._ending) and self._is_awake(thread):
            self._nap_at = self._next_nap() if self._every else 1 << 62
            self._remove(thread)
            length = int(self.random.choice(self._lengths) * (0.5 + self.random.random()))
            heapq.heappush(self._asleep, (self.now + length, self.steps, thread))
        super()._switch()

    def _is_awake(self, thread: Thread) -> bool:
        return thread.position < len(self._awake) and self._awake[thread.position] is thread

    def _pick(self) -> Thread:
        chosen = super()._pick()
        self._next_switch = min(self._next_switch, self._nap_at)
        return chosen

    def _load(self, addr: int, scope: int, order: int) -> int:
        value = super()._load(addr, scope, order)
        # the value of a watched word is outdated when the thread uses it
        napper = self._every if self._nappers == 0 else self.thread.index < self._nappers
        if addr in self.watched and napper and self.random.random() < self._after_load:
            self._next_switch = self._nap_at = self.steps
        return value

    def _store(self, addr: int, value: int, scope: int, order: int) -> None:
        super()._store(addr, value, scope, order)
        if addr in self.watched:
            self.watched[addr](int(value))

    def _finish(self, op: str, addr: int, old: int, value: int, *order: int) -> int:
        result = super()._finish(op, addr, old, value, *order)
        if addr in self.watched:
            self.watched[addr](int(value))
        return result

    def _update_item(self, name: str, addr: int, value: Any, *arguments: Any) -> Any:
        old = super()._update_item(name, addr, value, *arguments)
        if addr in self.watched:
            self.watched[addr](self.memory.locations[addr].messages[-1].value)
        return old

    def serve(self, *steps: Callable[[], Any]) -> None:
        """Call each of `steps` repeatedly, concurrently with the threads of the next `run`."""
        for number, step in enumerate(steps):
            self.spawn(self._serve, step, name=f"service-{number}", daemon=True)
